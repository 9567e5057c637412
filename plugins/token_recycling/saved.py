"""Successors on disk: a line for each namespace, with the likeliest tokens after each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdec.sdk.json_files import load_lines, save_lines

FILE_NAME, FORMAT = "successors.jsonl", 1


def save_successors(directory: Path, by_namespace: Mapping[str, Mapping[int, Sequence[int]]], vocab_size: int) -> None:
    """Write them below a directory, the namespace used last at the end."""
    items = by_namespace.items()
    entries = ([namespace, [[token, *after] for token, after in rows.items()]] for namespace, rows in items)
    save_lines(directory / FILE_NAME, {"format": FORMAT, "vocab_size": vocab_size}, entries)


def load_successors(directory: Path, vocab_size: int) -> dict[str, dict[int, Sequence[int]]]:
    """What `save_successors` wrote. Raises ConfigError SD-E180 if it does not fit."""
    header, form = {"format": FORMAT, "vocab_size": vocab_size}, f"lists of token ids in 0 .. {vocab_size - 1}"
    is_namespace = partial(_is_namespace, vocab_size)
    entries = load_lines(directory / FILE_NAME, header, is_namespace, f"namespace with {form}", "successors")
    return {namespace: {token: following for token, *following in rows} for namespace, rows in entries}


def _is_namespace(vocab_size: int, entry: Any) -> bool:
    match entry:
        case [str(), [*rows]]:
            return all(isinstance(row, list) and len(row) > 1 and _are_tokens(row, vocab_size) for row in rows)
    return False


def _are_tokens(row: Sequence[Any], vocab_size: int) -> bool:
    return all(type(token) is int and 0 <= token < vocab_size for token in row)
