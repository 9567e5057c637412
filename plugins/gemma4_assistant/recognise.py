"""Which checkpoints this proposer is for."""

from __future__ import annotations

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Assistants as Google publishes them."""
    registry.add("gemma4_assistant", is_assistant)


def is_assistant(checkpoint: Checkpoint) -> bool:
    """Whether config.json states the model type, and there is a projection of the target's states."""
    return checkpoint.config.get("model_type") in MODEL_TYPES and "pre_projection.weight" in checkpoint.shapes
