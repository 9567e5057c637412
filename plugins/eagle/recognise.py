"""Which checkpoints these proposers are for. Relatives that are not implemented are claimed too: refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError

from .names import our_shapes

_KINDS = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3"}  # by the type that speculators writes
_EAGLE3_MARKS = ("eagle3", "peagle")  # in a class name of `architectures`, in lower case
_BLOCK_DRAFTING_MARKS = ("dflash", "dspark", "lilicorr")


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """EAGLE-1 and EAGLE-3 checkpoints of every publisher."""
    registry.add("eagle", is_eagle)
    registry.add("eagle3", is_eagle3)


def is_eagle(checkpoint: Checkpoint) -> bool:
    """Whether it is an EAGLE-1 head, in its authors' layout or vLLM's."""
    return _kind_of(checkpoint) == "eagle"


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether it is an EAGLE-3 or P-EAGLE head."""
    return _kind_of(checkpoint) == "eagle3"


def _kind_of(checkpoint: Checkpoint) -> str | None:
    """What config.json states. A configuration of any one-layer model is decided by the tensors."""
    config = checkpoint.config
    stated = config.get("speculators_model_type")
    if stated is not None:
        return _KINDS.get(stated)
    if config.get("model_type") == "eagle":
        return "eagle" if isinstance(config.get("model"), Mapping) else None
    if _is_other_family(config):
        return None
    if _states_eagle3(config):
        return "eagle3"
    return _kind_by_tensors(checkpoint) if config.get("num_hidden_layers") == 1 else None


def _kind_by_tensors(checkpoint: Checkpoint) -> str | None:
    """Behind a projection the first layer of an EAGLE-1 head has no input norm, that of an EAGLE-3 head has two."""
    try:
        shapes = our_shapes(checkpoint)
    except CheckpointError:  # weights of some other kind, if any: nothing here to recognise
        return None
    kind, mark = "eagle", "layers.0.mlp.gate_proj.weight"
    if "layers.0.input_layernorm.weight" in shapes:
        kind, mark = "eagle3", "layers.0.hidden_norm.weight"
    return kind if "fc.weight" in shapes and mark in shapes else None


def _states_eagle3(config: Mapping[str, object]) -> bool:
    if isinstance(config.get("eagle_config"), Mapping) or config.get("draft_vocab_size") is not None:
        return True
    return _has_architecture(config, _EAGLE3_MARKS)


def _is_other_family(config: Mapping[str, object]) -> bool:
    return isinstance(config.get("dflash_config"), Mapping) or _has_architecture(config, _BLOCK_DRAFTING_MARKS)


def _has_architecture(config: Mapping[str, object], marks: tuple[str, ...]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(mark in str(name).lower() for name in names for mark in marks)
