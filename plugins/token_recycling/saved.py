"""Successors on disk: a line for each namespace, with the likeliest tokens after each token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.sdk import ConfigError
from specdec.sdk.json_files import read_json, read_text

FILE_NAME, FORMAT = "successors.jsonl", 1


def save_successors(directory: Path, by_namespace: Mapping[str, Mapping[int, Sequence[int]]], vocab_size: int) -> None:
    """Write them below a directory, the namespace used last at the end."""
    lines = [json.dumps({"format": FORMAT, "vocab_size": vocab_size})]
    for namespace, successors in by_namespace.items():
        lines.append(json.dumps([namespace, [[token, *following] for token, following in successors.items()]]))
    (directory / FILE_NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_successors(directory: Path, vocab_size: int) -> dict[str, dict[int, Sequence[int]]]:
    """What `save_successors` wrote. Raises ConfigError SD-E180 if it does not fit."""
    file = directory / FILE_NAME
    try:
        header, *lines = read_text(file).splitlines()
        found = read_json(header)
        entries = [read_json(line) for line in lines]
    except (OSError, ValueError) as error:
        raise _unusable(file, error) from error
    wanted = {"format": FORMAT, "vocab_size": vocab_size}
    if found != wanted:
        raise _unusable(file, f"it is of {found}, and this target needs {wanted}")
    for number, entry in enumerate(entries):
        if not _is_namespace(entry, vocab_size):
            reason = f"line {number + 2} is no namespace with lists of token ids in 0 .. {vocab_size - 1}"
            raise _unusable(file, reason)
    return {namespace: {token: following for token, *following in rows} for namespace, rows in entries}


def _is_namespace(entry: Any, vocab_size: int) -> bool:
    match entry:
        case [str(), [*rows]]:
            return all(isinstance(row, list) and len(row) > 1 and _are_tokens(row, vocab_size) for row in rows)
    return False


def _are_tokens(row: Sequence[Any], vocab_size: int) -> bool:
    return all(type(token) is int and 0 <= token < vocab_size for token in row)


def _unusable(file: Path, reason: object) -> ConfigError:
    facts = {"file": file, "because": reason, "fix": "give the directory that `save` wrote with the same target"}
    return ConfigError("SD-E180", "the saved successors cannot be used", facts)
