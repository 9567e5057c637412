"""Which checkpoints this proposer is for. Relatives that it cannot run are claimed too: they are refused by name."""

from __future__ import annotations

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint

from .variants import is_dspark, is_family


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """The checkpoints of the DFlash family."""
    registry.add("dflash", is_dflash)
    registry.add("dspark", is_dspark)


def is_dflash(checkpoint: Checkpoint) -> bool:
    """Any member of the family but DSpark, which has a method of its own, as in vLLM."""
    return is_family(checkpoint) and not is_dspark(checkpoint)
