"""Hash the source of a proposer, so that two versions under one name can be told apart."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path


def source_sha256(target: str | None) -> str | None:
    """Hash the file of a loaded "module:Class". None means that there is no class, or no Python file of it."""
    module = sys.modules.get((target or "").partition(":")[0])
    try:
        path = inspect.getsourcefile(module) if module else None
    except TypeError:  # a module without a file
        path = None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
