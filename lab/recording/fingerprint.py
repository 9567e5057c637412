"""Whether a model or a tokenizer is the one that was recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PIECES, PIECE = 64, 4096


def of_model(directory: Path | None, config: Mapping[str, Any]) -> str:
    """Hash the configuration, and of each weight file, where there is a checkpoint, its size and 64 pieces.

    Pieces are read so that a model of 140 GB takes no minutes; training changes every piece.
    """
    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True, default=str).encode())
    for path in sorted(directory.glob("*.safetensors")) if directory else ():
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for piece in range(PIECES):
                file.seek(max(size - PIECE, 0) * piece // (PIECES - 1))
                digest.update(file.read(PIECE))
    return digest.hexdigest()


def of_tokenizer(tokenizer: Any) -> str | None:
    """Hash the vocabulary and the chat template. None means that there is no tokenizer."""
    if tokenizer is None:
        return None
    facts = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
