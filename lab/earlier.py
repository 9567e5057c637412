"""An earlier run's result file as the baseline of a new one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from specdec.sdk import ConfigError
from specdec.sdk.json_files import read_json

from .dataset_files import read_text
from .prompts import BenchPrompt
from .result import SCHEMA_VERSION, Timing

SAME_CONFIGURATION = (
    "model",
    "dtype",
    "device",
    "engine",
    "prompts_sha256",
    "output_len",
    "max_concurrency",
    "temperature",
    "seed",
)
SAME_ENVIRONMENT = ("specdec", "torch", "transformers", "cpu_model", "cores", "threads", "gpu_model")


class EarlierRun:
    """A plain run, saved with --save-result. Raises ConfigError SD-E161 or SD-E166 (not such a file)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        result = _read(path)
        self._configuration: Mapping[str, Any] = result["configuration"]
        self._environment: Mapping[str, Any] = result["environment"]
        try:
            num_tokens = Counter[str]()
            for request in result["requests"]:
                num_tokens[request["category"]] += len(request["output_token_ids"])
            self.timing = Timing(tuple(_seconds(repeat) for repeat in result["repeats"]), num_tokens)
            self.outputs: dict[str, tuple[int, ...]] = {
                request["prompt_id"]: tuple(request["output_token_ids"]) for request in result["requests"]
            }
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _no_result(path, f"repeats or requests of another form: {error!r}") from error

    def refuse_unlike(
        self, configuration: Mapping[str, Any], environment: Mapping[str, Any], prompts: Sequence[BenchPrompt]
    ) -> None:
        """Raise ConfigError SD-E167 with every setting in which that run cannot be compared with this one.

        prompts: of this run. Raises ConfigError SD-E166 if the file lacks a repeat, or the figures of a prompt.
        """
        facts = {
            key: f"earlier {then.get(key)!r}, now {now[key]!r}"
            for then, now, keys in (
                (self._configuration, configuration, SAME_CONFIGURATION),
                (self._environment, environment, SAME_ENVIRONMENT),
            )
            for key in keys
            if then.get(key) != now[key]
        }
        if self._configuration.get("speculative_config") is not None:
            facts["speculative_config"] = "the earlier run used a proposer; a baseline is a run without -sc"
        if facts:
            raise ConfigError("SD-E167", f"{str(self._path)!r} is a run unlike this one", facts)
        ids, categories = {each.prompt_id for each in prompts}, {each.category for each in prompts}
        whole = self.timing.repeats and all(repeat.keys() == categories for repeat in self.timing.repeats)
        whole = whole and all(self.timing.tokens(category) for category in categories)
        if not whole or self.outputs.keys() != ids:
            raise _no_result(self._path, "no repeat, or other prompts and categories than its prompts_sha256 says")


def _read(path: Path) -> dict[str, Any]:
    try:
        result = read_json(read_text(path))
    except json.JSONDecodeError as error:
        raise _no_result(path, f"not JSON: {error}") from error
    keys = {"schema_version", "configuration", "environment", "repeats", "requests"}
    if not isinstance(result, dict) or not keys <= result.keys():
        raise _no_result(path, "not all of " + ", ".join(sorted(keys)))
    if not all(isinstance(result[key], dict) for key in ("configuration", "environment")):
        raise _no_result(path, "a configuration or environment that is no object")
    if result["schema_version"] != SCHEMA_VERSION:
        raise _no_result(path, f"schema_version {result['schema_version']!r}, not {SCHEMA_VERSION}")
    return result


def _no_result(path: Path, found: str) -> ConfigError:
    facts = {"found": found, "fix": "make one: specdec bench MODEL --save-result FILE"}
    return ConfigError("SD-E166", f"{str(path)!r} is no result of specdec bench", facts)


def _seconds(repeat: Mapping[str, Any]) -> dict[str, float]:
    found = {name: times["seconds"] for name, times in repeat["by_category"].items()}
    wrong = [each for each in found.values() if type(each) not in (int, float) or not 0 < each < inf]
    if wrong:
        raise ValueError(f"seconds are numbers above 0, found {wrong[0]!r}")
    return found
