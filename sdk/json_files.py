"""JSON that others wrote: files, lines of files, and settings on a command line.

Whatever a file holds, reading it raises ValueError or OSError and nothing else.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .errors import ConfigError

EXCERPT = 80
"""Characters shown before and after the place of an error."""


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


def as_mapping(value: object, where: str, example: str) -> dict[str, Any]:
    """A JSON text or a mapping as a mapping.

    Raises ConfigError SD-E130, SD-E132, which name the setting, `where`, and show the `example`.
    """
    values = _from_json(value, where, example) if isinstance(value, str) else value
    if not isinstance(values, Mapping):
        facts = {"expected": f"an object such as {example}", "found": f"{type(values).__name__}: {values!r}"}
        raise ConfigError("SD-E132", f"{where} is not an object", facts)
    return {str(key): item for key, item in values.items()}


def _from_json(text: str, where: str, example: str) -> Any:
    try:
        return read_json(text, partial(_without_repeats, where))
    except json.JSONDecodeError as error:
        facts = {
            "position": f"line {error.lineno}, column {error.colno}: {error.msg}",
            "found": _marked(error) if text.strip() else "an empty text",
            "fix": f"an object such as {example}; in a shell, put single quotes around it",
        }
        raise ConfigError("SD-E130", f"{where} is not JSON", facts) from error


def _marked(error: json.JSONDecodeError) -> str:
    """What stands around the place of an error, and a mark below it."""
    line = error.doc.split("\n")[error.lineno - 1]
    start = max(0, error.colno - EXCERPT)
    return f"{line[start : error.colno + EXCERPT]}\n{'^':>{error.colno - start}}"


def _without_repeats(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError("SD-E130", f"{where} has a key twice", {"key": ", ".join(repeated)})
    return dict(pairs)


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. Raises OSError, also for what is no file, and UnicodeDecodeError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "this is no file", str(path))
    return path.read_text(encoding="utf-8")


def read_json_file(path: Path) -> Any:
    """The value of a JSON file. Raises OSError, also for what is no file, and ValueError."""
    return read_json(read_text(path))


def save_lines(file: Path, header: Mapping[str, Any], entries: Iterable[Any]) -> None:
    """Write a line for each entry, behind one that says of which kind they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(each)}\n" for each in (header, *entries)), encoding="utf-8")


def load_lines(file: Path, header: Mapping[str, Any], is_one: Callable[[Any], bool], form: str, what: str) -> list[Any]:
    """The entries that `save_lines` wrote with this header. Raises ConfigError SD-E180 if they are no such ones.

    is_one: whether a value is an entry. form: how one looks. what: the noun for all of them.
    """

    def unusable(reason: object) -> ConfigError:
        facts = {"file": file, "because": reason, "fix": "give the directory that `save` wrote with the same target"}
        return ConfigError("SD-E180", f"the saved {what} cannot be used", facts)

    try:
        found, *entries = [read_json(line) for line in read_text(file).splitlines()]
    except (OSError, ValueError) as error:
        raise unusable(error) from error
    if found != header:
        raise unusable(f"it is of {found}, and this target needs {header}")
    for number, entry in enumerate(entries):
        if not is_one(entry):
            raise unusable(f"line {number + 2} is no {form}")
    return entries
