"""Which checkpoints this proposer is for."""

from __future__ import annotations

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Hydra heads of every kind; those that are not implemented are refused by name."""
    registry.add("hydra", is_hydra)


def is_hydra(checkpoint: Checkpoint) -> bool:
    """Whether config.json states `hydra_num_heads`."""
    return checkpoint.config.get("hydra_num_heads") is not None
