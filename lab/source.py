"""From which source a proposer came, so that two versions under one name can be told apart."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path


def source_sha256(target: str | None) -> str | None:
    """Of the file of a loaded "module:Class". None means no class, or one without a file of Python."""
    module = sys.modules.get((target or "").partition(":")[0])
    try:
        path = inspect.getsourcefile(module) if module else None
    except TypeError:  # a module without a file
        path = None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
