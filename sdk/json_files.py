"""JSON that others wrote: whatever it is, reading it raises ValueError or OSError and nothing else."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_json(text: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text. Raises JSONDecodeError, also for nesting and numbers that Python does not read."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", text, 0) from error
    except ValueError as error:  # a number of thousands of digits
        raise json.JSONDecodeError(str(error), text, 0) from error


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. Raises OSError, also for what is no file, and UnicodeDecodeError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "this is no file", str(path))
    return path.read_text(encoding="utf-8")


def read_json_file(path: Path) -> Any:
    """The value of a JSON file. Raises OSError, also for what is no file, and ValueError."""
    return read_json(read_text(path))
