"""Which checkpoints this proposer is for."""

from __future__ import annotations

import re

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint

from .layouts import find_modules

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Modules that were taken out of their target's checkpoint."""
    registry.add("mtp", is_mtp)


def is_mtp(checkpoint: Checkpoint) -> bool:
    """Whether config.json states it, or the tensors are a module's without the layers of a whole model around it.

    A whole model with a module inside is not claimed: as a draft it could be either.
    """
    stated = checkpoint.config.get("speculators_model_type")
    if stated is not None or all(checkpoint.config.get(count) is None for count in _COUNTS):
        return stated == "mtp"
    names = checkpoint.shapes
    is_whole_model = any(re.fullmatch(r"(.*\.)?model\.layers\.0\..*", name) for name in names)
    return not is_whole_model and find_modules(names) is not None
