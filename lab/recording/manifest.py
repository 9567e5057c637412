"""`manifest.json`: what a recording is of, and under which settings it was made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from specdec.sdk import ConfigError, StrictModel
from specdec.sdk.json_files import read_json_file
from specdec.sdk.ranges import INT32_MAX

from .monotone import end_slope, pooled

MANIFEST = "manifest.json"
SCHEMA: Final = "specdec.recording"
SCHEMA_VERSION: Final = 1
MOST_SECONDS = 1e6  # of a step
WRITTEN = "name a folder that `specdec record ... -o FOLDER` has written"


class Cost(StrictModel):
    """The measured seconds of a step against the rows that it computes."""

    rows: tuple[int, ...] = Field(default=(), description="tokens computed in a step, ascending")
    seconds: tuple[float, ...] = Field(default=(), description="the median step of so many rows, without proposing")

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        if len(self.rows) != len(self.seconds) or any(b <= a for a, b in pairwise((0, *self.rows))):
            raise ValueError("a step's seconds are wanted for each number of rows, which ascend from 1")
        if not all(0 < seconds <= MOST_SECONDS for seconds in self.seconds) or max(self.rows, default=0) > INT32_MAX:
            raise ValueError(f"seconds are above 0 and at most {MOST_SECONDS:.0f}, and rows at most {INT32_MAX}")
        return self

    @cached_property
    def _line(self) -> tuple[tuple[float, ...], float]:
        """The seconds as they never fall with the rows, and what each row past the last one adds."""
        seconds = pooled(self.seconds, [1.0] * len(self.rows))
        return seconds, end_slope(self.rows, seconds)

    def step_seconds(self, num_rows: int) -> float:
        """Seconds of a step with `num_rows` rows: interpolated linearly, and never less than a step of fewer rows.

        Past the last rows they are continued with the slope of a line through the upper half of the table. Raises
        ConfigError SD-E252 without a table.
        """
        if not self.rows:
            raise ConfigError(
                "SD-E252",
                "the recording has no cost of a step, so no time can be predicted",
                {"fix": "record with `specdec record`, which measures it, and without --no-cost"},
            )
        seconds, slope = self._line
        return float(np.interp(num_rows, self.rows, seconds)) + slope * max(num_rows - self.rows[-1], 0)


class Manifest(StrictModel):
    """Everything about a recording except its rows."""

    schema_name: Literal["specdec.recording"] = SCHEMA
    schema_version: Literal[1] = SCHEMA_VERSION
    source: str = Field(
        default="specdec", description='who generated: "specdec", "transformers", "vllm", "speculators", "specforge"'
    )
    model: str = Field(description="the target, as it was named")
    model_fingerprint: str | None = Field(
        default=None, description="of its configuration and weights. None means unknown"
    )
    tokenizer_fingerprint: str | None = Field(default=None, description="None means unknown, or no tokenizer")
    target: dict[str, Any] = Field(default_factory=dict, description="the fields of TargetInfo")
    engine: dict[str, Any] = Field(default_factory=dict, description="the fields of EngineConfig")
    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = Field(default_factory=dict, description="SamplingParams of the first request")
    dataset: dict[str, Any] = Field(default_factory=dict, description="name, path, hash of the prompts")
    top_m: int = Field(default=0, ge=0, description="probabilities kept at each position. 0 means none")
    hidden_states: tuple[int | Literal["final"], ...] = Field(
        default=(), description="layers kept, in the order of columns"
    )
    full_logits: bool = False
    cost: Cost = Cost()
    environment: dict[str, Any] = Field(default_factory=dict)
    complete: bool = Field(default=False, description="False: the recording was cut short, and can be resumed")

    def write(self, folder: Path) -> None:
        """Put it into the folder in one step."""
        part = folder / f"{MANIFEST}.tmp"
        part.unlink(missing_ok=True)  # it may lead to another file
        with part.open("x", encoding="utf-8") as file:
            json.dump(self.model_dump(mode="json"), file, indent=1)
        os.replace(part, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError SD-E244 for what is no recording, SD-E245 for one of a newer schema."""
        values = _json_of(folder)
        version = values.get("schema_version")
        if values.get("schema_name") != SCHEMA or not isinstance(version, int):
            raise not_a_recording(folder, f"{MANIFEST} is of something else")
        if version > SCHEMA_VERSION:
            facts = {
                "found": f"schema version {version}",
                "this specdec reads": f"up to {SCHEMA_VERSION}",
                "fix": "update specdec-sdk, or record again with this version into another folder",
            }
            raise ConfigError("SD-E245", f"the recording {str(folder)!r} has a newer schema", facts)
        return cls.parse(values, str(folder / MANIFEST))


def not_a_recording(folder: Path, because: str, fix: str = WRITTEN) -> ConfigError:
    """The error for a folder or shard that cannot be read as a recording."""
    facts = {"because": because, "looked for": folder.absolute(), "fix": fix}
    return ConfigError("SD-E244", f"{str(folder)!r} is no recording that can be read", facts)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as they come back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(values, default=_plain_value))
    return found


def _plain_value(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _json_of(folder: Path) -> dict[str, Any]:
    try:
        values = read_json_file(folder / MANIFEST)
    except OSError as error:
        raise not_a_recording(folder, f"{MANIFEST}: {error.strerror}") from error
    except ValueError as error:
        raise not_a_recording(folder, f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise not_a_recording(folder, f"{MANIFEST} is no object")
    return values
