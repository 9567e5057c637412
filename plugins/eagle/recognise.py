"""Which checkpoints these proposers are for. Relatives that are not implemented are claimed too: refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError

from .names import our_shapes

EAGLE3_TYPES = frozenset({"eagle3", "peagle"})
_EAGLE3_MARKS = ("eagle3", "peagle")  # in a class name of `architectures`, in lower case
_BLOCK_DRAFTING_MARKS = ("dflash", "dspark", "lilicorr")
_FIRST_LAYER_NORM = "layers.0.input_layernorm.weight"


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """EAGLE-1 and EAGLE-3 checkpoints of every publisher."""
    registry.add("eagle", is_eagle)
    registry.add("eagle3", is_eagle3)


def is_eagle(checkpoint: Checkpoint) -> bool:
    """Whether it is one layer without an input norm behind a projection of embedding and hidden state, or vLLM's form
    of that.
    """
    config = checkpoint.config
    stated = config.get("speculators_model_type")
    if stated is not None:
        return bool(stated == "eagle")
    if config.get("model_type") == "eagle":
        return isinstance(config.get("model"), Mapping)
    if _is_other_family(config) or _states_eagle3(config) or config.get("num_hidden_layers") != 1:
        return False
    shapes = _shapes(checkpoint)
    return "fc.weight" in shapes and "layers.0.mlp.gate_proj.weight" in shapes and _FIRST_LAYER_NORM not in shapes


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether config.json states it. A configuration of any one-layer model is decided by the tensors of the first
    layer.
    """
    config = checkpoint.config
    stated = config.get("speculators_model_type")
    if stated is not None:
        return stated in EAGLE3_TYPES
    if config.get("model_type") == "eagle" or _is_other_family(config):
        return False
    if _states_eagle3(config):
        return True
    if config.get("num_hidden_layers") != 1:
        return False
    shapes = _shapes(checkpoint)
    return "fc.weight" in shapes and "layers.0.hidden_norm.weight" in shapes and _FIRST_LAYER_NORM in shapes


def _shapes(checkpoint: Checkpoint) -> Mapping[str, tuple[int, ...]]:
    try:
        return our_shapes(checkpoint)
    except CheckpointError:  # weights of some other kind, if any: nothing here to recognise
        return {}


def _states_eagle3(config: Mapping[str, object]) -> bool:
    if isinstance(config.get("eagle_config"), Mapping) or config.get("draft_vocab_size") is not None:
        return True
    return _has_architecture(config, _EAGLE3_MARKS)


def _is_other_family(config: Mapping[str, object]) -> bool:
    return isinstance(config.get("dflash_config"), Mapping) or _has_architecture(config, _BLOCK_DRAFTING_MARKS)


def _has_architecture(config: Mapping[str, object], marks: tuple[str, ...]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(mark in str(name).lower() for name in names for mark in marks)
