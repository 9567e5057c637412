"""vLLM's keys of `speculative_config` that are no keys here: what is so already, what is refused, and the way here."""

from __future__ import annotations

import tomllib
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

    def answer(self, value: object) -> str:
        """Why it is refused. An empty text means that the value asks for what is so already."""
        if value is None or any(type(value) is type(each) and value == each for each in self.same):
            return ""
        return f"a key of vLLM's: {self.reason}. Here: {self.here}"


def offered_keys() -> tuple[str, ...]:
    """vLLM's keys that are keys here too, common ones or options of a packaged proposer."""
    return tuple(_data()["offered"])


@cache
def vllm_keys() -> dict[str, VllmKey]:
    """All others by name."""
    tables = {name: entry for name, entry in _data().items() if name not in ("offered", "values")}
    return {
        name: VllmKey(entry["reason"], entry["here"], tuple(entry.get("same", ()))) for name, entry in tables.items()
    }


@cache
def refused_values() -> dict[str, dict[str, str]]:
    """Why values of offered keys are refused, by key and value."""
    values: dict[str, dict[str, str]] = _data()["values"]
    return values


def _data() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("vllm_keys.toml").read_text(encoding="utf-8"))
