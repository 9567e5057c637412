"""Which checkpoints this proposer is for. Relatives that are not implemented are claimed too: refused by name."""

from __future__ import annotations

from specdec.sdk import Refusal, Registry, hookimpl
from specdec.sdk.checkpoint import Checkpoint


@hookimpl
def register_speculator_config(registry: Registry) -> None:
    """Medusa heads in either publisher's layout."""
    registry.add("medusa", is_medusa)


def is_medusa(checkpoint: Checkpoint) -> bool:
    """Whether config.json states `medusa_num_heads`, the model type of vLLM's layout, or the mark of a relative."""
    config = checkpoint.config
    is_relative = mark_of_redrafter(checkpoint) is not None
    return is_relative or config.get("medusa_num_heads") is not None or config.get("model_type") == "medusa"


def mark_of_redrafter(checkpoint: Checkpoint) -> str | None:
    """What in config.json tells a checkpoint of ReDrafter. None means that nothing does."""
    told = checkpoint.config.get("model_type") == "recurrent_drafting_drafter"
    key = "model_type" if told else "exit_dim"
    stated = checkpoint.config.get(key)
    return None if stated is None else f"{key}: {stated!r}"


def refuse_relatives(checkpoint: Checkpoint) -> None:
    """Raise Refusal for a relative of Medusa, with its mark."""
    mark = mark_of_redrafter(checkpoint)
    if mark is not None:
        reason = (
            f"this is a checkpoint of ReDrafter ({mark}), which is not implemented: its heads search with a beam, "
            "over a state that each token changes"
        )
        raise Refusal(reason, "Medusa heads, or a head of another family trained for this target")
