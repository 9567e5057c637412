"""Sweeps of which the README's test command runs a slice, and .ci/run or .ci/full all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def covering(*values: Sequence[Any]) -> list[Any]:
    """Every combination; those off the diagonal along the longest axis are `full`, so each value occurs in the rest."""
    marked = []
    for places in product(*(range(len(each)) for each in values)):
        case = [axis[place] for axis, place in zip(values, places, strict=True)]
        marked.append(pytest.param(*case, marks=() if _is_kept(places, values) else pytest.mark.full))
    return marked


def _is_kept(places: Sequence[int], values: Sequence[Sequence[Any]]) -> bool:
    longest = max(range(len(values)), key=lambda index: len(values[index]))
    return all(place == places[longest] % len(axis) for place, axis in zip(places, values, strict=True))


def pairs(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of all axes but the last, whose values take turns: any two values of two axes occur together.

    No other axis may be shorter than the last one.
    """
    *axes, last = values
    turns = product(*(enumerate(axis) for axis in axes))
    return [(*(value for _, value in each), last[sum(place for place, _ in each) % len(last)]) for each in turns]


def slow_unless(quick: str, names: Iterable[str]) -> list[Any]:
    """Every name; all but the one called `quick` carry the mark `slow`."""
    return [each if each == quick else pytest.param(each, marks=pytest.mark.slow) for each in names]
