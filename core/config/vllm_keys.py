"""vLLM's keys of `speculative_config` that are no keys here: what is so already, what is refused, and the way here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class VllmKey:
    """The answer to a key that neither the common ones nor the proposer's options declare."""

    reason: str
    here: str  # the way here
    same: tuple[Any, ...] = ()  # values that ask for what is so already, beside None

    def asks_nothing(self, value: object) -> bool:
        """Whether the value changes nothing here."""
        return value is None or any(type(value) is type(each) and value == each for each in self.same)

    @property
    def refusal(self) -> str:
        return f"a key of vLLM's: {self.reason}. Here: {self.here}"


@cache
def offered_keys() -> tuple[str, ...]:
    """vLLM's keys that are keys here too, common ones or options of a packaged proposer."""
    return tuple(_data()["offered"])


@cache
def vllm_keys() -> dict[str, VllmKey]:
    """All others by name."""
    tables = {name: entry for name, entry in _data().items() if name != "offered"}
    return {
        name: VllmKey(entry["reason"], entry["here"], tuple(entry.get("same", ()))) for name, entry in tables.items()
    }


def asked(values: Mapping[str, Any], declared: frozenset[str]) -> dict[str, Any]:
    """`values` without undeclared keys of vLLM's that ask for what is so already."""
    known = vllm_keys()
    return {
        key: value
        for key, value in values.items()
        if key in declared or key not in known or not known[key].asks_nothing(value)
    }


def _data() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("vllm_keys.toml").read_text(encoding="utf-8"))
