"""The names of tensors, which differ by publisher, under one layout's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError

_T = TypeVar("_T")
_RENAMED = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}

UNUSED = ("t2d", "verifier_*", "*.rotary_emb.inv_freq")
"""Of training, or computed: patterns of tensors that a checkpoint may hold and that nothing here reads."""


def our_names(stored: Mapping[str, _T]) -> dict[str, _T]:
    """The same values by our names."""
    return {_our_name(name): value for name, value in stored.items()}


def our_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape by our name, from the headers of the weight files. Raises CheckpointError SD-E146."""
    return our_names(checkpoint.shapes)


def count_layers(shapes: Mapping[str, object], checkpoint: Checkpoint) -> int:
    """How many layers are stored; configurations are not reliable there. Raises CheckpointError SD-E172 if none is."""
    stored = {
        int(name.split(".")[1]) for name in shapes if name.startswith("layers.") and name.split(".")[1].isdecimal()
    }
    if stored != set(range(len(stored))) or not stored:
        facts = {
            "expected": "tensors of layers 0, 1, ...",
            "found": ", ".join(f"layers.{layer}" for layer in sorted(stored)) or ", ".join(sorted(shapes)[:12]),
            "checkpoint": checkpoint.directory,
        }
        raise CheckpointError("SD-E172", "the draft checkpoint lacks tensors of a layer", facts)
    return len(stored)


def _our_name(stored: str) -> str:
    name = stored.removeprefix("model.")
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
