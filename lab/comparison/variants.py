"""What is compared: each proposer asked for, with every combination of the values that are swept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from json import JSONDecodeError
from pathlib import PurePath
from typing import Any

from specdec.core.config.settings_text import read_json
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.sdk import ConfigError

RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST_VALUES = 100


@dataclass(frozen=True)
class Sweep:
    """A key of speculative_config and the values that it takes in turn."""

    key: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """From KEY=FIRST..LAST or KEY=VALUE,VALUE. A value is JSON where it can be, else text.

        Raises ConfigError SD-E253.
        """
        key, equals, values = text.partition("=")
        whole = RANGE.fullmatch(values)
        if whole:
            first, last = map(int, whole.groups())
            found: tuple[Any, ...] = tuple(range(first, last + 1)[: MOST_VALUES + 1])
        else:
            found = tuple(_value(each) for each in values.split(",") if each)
        if not key or not equals or not found or len(found) > MOST_VALUES:
            facts = {
                "expected": f"KEY=FIRST..LAST or KEY=VALUE,VALUE with 1 to {MOST_VALUES} values",
                "found": repr(text),
                "fix": "for example --sweep num_speculative_tokens=1..8",
            }
            raise ConfigError("SD-E253", "a sweep cannot be read", facts)
        return cls(key, found)


@dataclass(frozen=True)
class Variant:
    """One proposer with its settings, and a name for people that no other one has."""

    label: str
    speculative_config: Mapping[str, Any]


def variants(asked: Sequence[str | Mapping[str, Any]], sweeps: Sequence[Sweep]) -> list[Variant]:
    """Every proposer with every combination of swept values, in the order given.

    Raises ConfigError: SD-E254 without a proposer, SD-E253 for a key that is swept twice, SD-E130 to SD-E133.
    """
    if not asked:
        facts = {"fix": """-sc '{"method": "ngram"}', once for each proposer"""}
        raise ConfigError("SD-E254", "there is no proposer to compare", facts)
    repeated = [key for key, count in Counter(sweep.key for sweep in sweeps).items() if count > 1]
    if repeated:
        facts = {"swept twice": ", ".join(repeated), "fix": "all values in one --sweep"}
        raise ConfigError("SD-E253", "a key is swept twice", facts)
    changes = [dict(each) for each in product(*[[(sweep.key, value) for value in sweep.values] for sweep in sweeps])]
    settings = [SpeculativeConfig.as_mapping(each) | change for each in asked for change in changes]
    for each in settings:
        SpeculativeConfig.parse(each)
    return [Variant(label, each) for label, each in zip(_labels(settings), settings, strict=True)]


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The proposer's name and what is set beside it; the same settings again get a number."""
    labels, seen = [], Counter[str]()
    for each in settings:
        name = each.get("method") or PurePath(str(each["model"])).name
        rest = {key: value for key, value in each.items() if key not in ("method", "model")}
        length = rest.pop("num_speculative_tokens", None)
        parts = [str(name)] + ([f"K={length}"] if length is not None else [])
        label = " ".join(parts + [f"{key}={value}" for key, value in rest.items()])
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return labels


def _value(text: str) -> Any:
    try:
        return read_json(text)
    except JSONDecodeError:
        return text
