"""Which checkpoints this proposer is for. Arctic's relatives are claimed too: they are refused by name."""

from __future__ import annotations

from specdec.sdk import Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """MLP speculators in the layout of IBM's models, which vLLM reads."""
    registry.add("mlp_speculator", is_mlp_speculator)


def is_mlp_speculator(checkpoint: Checkpoint) -> bool:
    """Whether config.json states the model type, or `n_predict`."""
    config = checkpoint.config
    return config.get("model_type") == "mlp_speculator" or config.get("n_predict") is not None
