"""Which checkpoints this proposer is for. The family's variants are claimed too, so that they are refused by name."""

from __future__ import annotations

from specdec.sdk import Checkpoint, Registry, hookimpl

from .variants import SPECULATORS_TYPES, is_family_architecture


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """The checkpoints of the DFlash family."""
    registry.add("dflash", is_dflash)


def is_dflash(checkpoint: Checkpoint) -> bool:
    """By what config.json states: a speculators type, a `dflash_config`, or an architecture of the family."""
    config = checkpoint.config
    stated = config.get("speculators_model_type")
    if stated is not None:
        return stated in SPECULATORS_TYPES
    return isinstance(config.get("dflash_config"), dict) or any(
        is_family_architecture(str(name)) for name in config.get("architectures") or ()
    )
