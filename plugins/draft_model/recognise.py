"""Which checkpoints are plain language models, and so drafters by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint

MARKS_OF_OTHERS = (
    "speculators_*",
    "draft_vocab_size",
    "*_aux_hidden_state_*",
    "target_layer_ids",
    "target_hidden_size",
    "mask_token_id",
    "*dflash*",
    "*dspark*",
    "*eagle*",
    "*medusa*",
)
"""Keys that configurations of draft heads have and those of language models lack."""

NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Layers for drafting that a target's own checkpoint brings along."""

PARTS_OF_OTHERS = frozenset({"fc", "mtp", "mtp_layers", "eh_proj", "midlayer", "medusa_head"})
"""Parts of tensor names by which a draft head reads a target's hidden states."""

_MOST_LAYERS = 10_000
PREDICTED_BY = "ForCausalLM"


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Plain causal language models."""
    registry.add("draft_model", is_language_model)


def is_language_model(checkpoint: Checkpoint) -> bool:
    """Whether it is a causal language model without anything of another drafter.

    The configuration names one architecture for causal language modelling and has no key of a draft head. Heads are
    published under a language model's configuration too, so the tensors have to agree: there is an input embedding,
    there are as many layers as the configuration counts, and nothing that reads another model's hidden states.
    """
    config = checkpoint.config
    names = config.get("architectures") or []
    if len(names) != 1 or not str(names[0]).endswith(PREDICTED_BY) or _is_of_another(config):
        return False
    shapes = checkpoint.shapes
    parts = {part for name in shapes for part in name.split(".")}
    return _embeds(config, shapes) and _layers(shapes) == _num_layers(checkpoint) and parts.isdisjoint(PARTS_OF_OTHERS)


def _is_of_another(config: Mapping[str, Any]) -> bool:
    if any(config.get(key) for key in NEXT_TOKEN_LAYERS):
        return True
    stated = (key for key, value in config.items() if value is not None)
    return any(fnmatchcase(key, mark) for key in stated for mark in MARKS_OF_OTHERS)


def _embeds(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether there is a matrix with a row for each token."""
    return any(len(shape) == 2 and shape[0] == config.get("vocab_size") for shape in shapes.values())


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> set[int]:
    """The first number in each name: the layer that it is of."""
    numbers = (next((part for part in name.split(".") if part.isdecimal()), None) for name in shapes)
    return {int(number) for number in numbers if number is not None}


def _num_layers(checkpoint: Checkpoint) -> set[int]:
    names = ("num_hidden_layers", "n_layer", "num_layers")
    stated = (count for name in names if (count := checkpoint.get(name, int, None)) is not None)
    return set(range(min(next(stated, 0), _MOST_LAYERS)))
