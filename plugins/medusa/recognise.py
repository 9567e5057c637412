"""Which checkpoints this proposer is for."""

from __future__ import annotations

from specdec.sdk import Checkpoint, Registry, hookimpl


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Medusa heads in either publisher's layout."""
    registry.add("medusa", is_medusa)


def is_medusa(checkpoint: Checkpoint) -> bool:
    """By what config.json states: `medusa_num_heads`, or the model type of vLLM's layout."""
    config = checkpoint.config
    return config.get("medusa_num_heads") is not None or config.get("model_type") == "medusa"
