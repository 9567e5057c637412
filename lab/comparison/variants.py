"""What is compared: each proposer asked for, with every combination of the values that are swept."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from json import JSONDecodeError
from pathlib import PurePath
from typing import Any

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.sdk import ConfigError
from specdec.sdk.json_files import read_json

RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST_VALUES = 100


OPTIONS = "proposer_config"
"""The key under which a proposer's own options may stand; they may also stand beside it."""


@dataclass(frozen=True)
class Sweep:
    """A key of speculative_config and the values that it takes in turn.

    An option of the proposer is named alone or as proposer_config.KEY.
    """

    key: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Read KEY=FIRST..LAST or KEY=VALUE,VALUE. A value is JSON where it can be, else text.

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
                "fix": "for example --sweep num_speculative_tokens=1..8; a proposer's option: --sweep OPTION=A,B",
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
    names = Counter(sweep.key.removeprefix(f"{OPTIONS}.") for sweep in sweeps)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        facts = {"swept twice": ", ".join(repeated), "fix": "all values in one --sweep"}
        raise ConfigError("SD-E253", "a key is swept twice", facts)
    changes = [dict(each) for each in product(*[[(sweep.key, value) for value in sweep.values] for sweep in sweeps])]
    settings = [_changed(SpeculativeConfig.as_mapping(each), change) for each in asked for change in changes]
    for each in settings:
        SpeculativeConfig.parse(each)
    return [Variant(label, each) for label, each in zip(_labels(settings), settings, strict=True)]


def _changed(settings: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with swept values: an option stays where it is set already."""
    changed, options = dict(settings), dict(settings.get(OPTIONS) or {})
    for key, value in change.items():
        name = key.removeprefix(f"{OPTIONS}.")
        if name in options or (name != key and name not in settings):
            options[name] = value
        else:
            changed[name] = value
    return changed | ({OPTIONS: options} if options else {})


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The proposer's name and what is set beside it; the same settings again get a number.

    A method that has several checkpoints is named with the checkpoint.
    """
    labels, seen, models = [], Counter[str](), defaultdict[Any, set[str]](set)
    for each in settings:
        models[each.get("method")].add(str(each.get("model")))
    for each in settings:
        method, model = each.get("method"), PurePath(str(each.get("model") or "")).name
        name = method if method and len(models[method]) == 1 else f"{method or ''} {model}".strip()
        rest = {key: value for key, value in each.items() if key not in ("method", "model")}
        length = rest.pop("num_speculative_tokens", None)
        parts = [str(name)] + ([f"K={length}"] if length is not None else [])
        options = rest.pop(OPTIONS, None)
        rest |= options if isinstance(options, Mapping) else {}
        label = " ".join(parts + [f"{key}={value}" for key, value in rest.items()])
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return labels


def _value(text: str) -> Any:
    try:
        return read_json(text)
    except JSONDecodeError:
        return text
