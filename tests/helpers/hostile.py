"""What strangers may put where our readers read: texts, values in the place of others, changed bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

NAMES = ["..", "", ".", "../..", "/", "/etc", "a/b", "a\0b", "~", "\ud800", "x" * 5000, "state-", "con"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(NAMES)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner), max_leaves=6
)
NOT_JSON = st.one_of(
    st.binary(max_size=64),
    VALUES.map(json.dumps).map(str.encode),
    st.sampled_from([b"", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{" * 200_000, b"[" * 200_000, b'{"a":' * 100_000]),
    st.just(b"1" * 5000),
)
"""Texts of files that should hold a JSON object."""


def changed(values: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The values with some replaced, left out or added, at any depth."""
    ways = _ways(dict(values))
    one = st.sampled_from(ways).flatmap(lambda way: VALUES.map(lambda value: (way, value)))
    return st.lists(one, min_size=1, max_size=3).map(lambda changes: _applied(values, changes))


def _ways(values: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = values.items() if isinstance(values, dict) else ()
    return [
        (*before, "more"),
        *((*before, key) for key, _ in inner),
        *(way for key, value in inner if isinstance(value, dict) for way in _ways(value, (*before, key))),
    ]


def _applied(values: Mapping[str, Any], changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(values))
    for way, value in changes:
        place: Any = result
        for key in way[:-1]:
            place = place.get(key) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[way[-1]] = value
    return result


def flip(path: Path, place: int, mask: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= mask
    path.write_bytes(data)


def tree(root: Path) -> dict[str, bytes | str | None]:
    """Every file below, with what it holds; links with where they lead, directories with None."""
    found: dict[str, bytes | str | None] = {}
    for each in sorted(root.rglob("*")):
        name = str(each.relative_to(root))
        found[name] = os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else None
    return found
