"""Fields that publishers write in different places."""

from __future__ import annotations

from typing import Any

from specdec.sdk.checkpoint import Checkpoint

ANYTHING = (object, bool)
NUMBER = (int, float)


def anywhere(checkpoint: Checkpoint, name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a member's own part, or else of the top level, or else of the layers; None if it is in none of them.

    Raises CheckpointError SD-E171 for a value of another type.
    """
    for path in (f"dflash_config.{name}", f"dspark_config.{name}", name, f"transformer_layer_config.{name}"):
        value = checkpoint.get(path, kind, None)
        if value is not None:
            return value
    return None


def required(checkpoint: Checkpoint, name: str, kind: type | tuple[type, ...]) -> Any:
    """A field that `anywhere` finds. Raises CheckpointError: SD-E170 if it is absent, SD-E171 for another type."""
    value = anywhere(checkpoint, name, kind)
    return checkpoint.get(name, kind) if value is None else value
