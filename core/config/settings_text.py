"""JSON that users write: settings on a command line, lines of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from specdec.sdk.errors import ConfigError
from specdec.sdk.json_files import read_json

EXCERPT = 80
"""Characters shown before and after the place of an error."""


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
