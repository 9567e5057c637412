"""Which checkpoints this proposer is for."""

from __future__ import annotations

from specdec.sdk import Registry, hookimpl
from specdec.sdk.model_proposer import is_adapter


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Adapters of PEFT; those that are not implemented are refused by name."""
    registry.add("uno", is_adapter)
