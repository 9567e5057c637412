"""Which checkpoints this proposer is for. Relatives that are not implemented are claimed too: refused by name."""

from __future__ import annotations

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint

from .relatives import relative_of


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Medusa heads in either publisher's layout."""
    registry.add("medusa", is_medusa)


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether config.json states `medusa_num_heads`, the model type of vLLM's layout, or the mark of a relative."""
    config = checkpoint.config
    is_relative = relative_of(checkpoint) is not None
    return is_relative or config.get("medusa_num_heads") is not None or config.get("model_type") == "medusa"
