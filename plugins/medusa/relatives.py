"""Other heads on the target's last hidden state, recognised to be refused by name: they draft in ways of their own."""

from __future__ import annotations

from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint

_TYPES = {"recurrent_drafting_drafter": "ReDrafter"}
_KEYS = {"exit_dim": "ReDrafter"}


def relative_of(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """The name of a relative, and the mark in config.json that tells."""
    stated = checkpoint.config.get("model_type")
    if stated in _TYPES:
        return _TYPES[str(stated)], f"model_type: {stated!r}"
    key = next((each for each in _KEYS if checkpoint.config.get(each) is not None), None)
    return None if key is None else (_KEYS[key], f"{key}: {checkpoint.config[key]!r}")


def refuse_relatives(checkpoint: Checkpoint) -> None:
    """Raise Refusal for a relative of Medusa, with its mark."""
    found = relative_of(checkpoint)
    if found is not None:
        reason = (
            f"this is a checkpoint of {found[0]} ({found[1]}), which is not implemented: its heads search with a beam, "
            "over a state that each token changes"
        )
        raise Refusal(reason, "Medusa heads, or a head of another family trained for this target")
