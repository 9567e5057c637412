"""What a stage found, kept as it is found; and the goals that figures are judged by."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple


class Goal(NamedTuple):
    """A bound that was set before anything was measured."""

    at_least: bool
    bound: float
    unit: str

    def is_met_by(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.bound:g} {self.unit}".rstrip()


PLAIN_OF_FLOOR = "8B, batch 1, plain: share of the bandwidth floor"
PLAIN_OF_TRANSFORMERS = "8B, batch 1, plain: speed over transformers'"
STEP_OVERHEAD = "8B, batch 1: step beyond the forward pass"
SLOWEST_STEP = "8B, batch 1: slowest step over the median"
LAYER_KERNELS = "8B, compiled: kernels of a step for each layer"
SAMPLER = "sampler, 256 x 5 x 152k bf16"
EAGLE_PASS = "EAGLE-3 of 8B, batch 1: a draft pass over the bandwidth floor of its weights"

GOALS = {
    PLAIN_OF_FLOOR: Goal(True, 0.75, ""),
    PLAIN_OF_TRANSFORMERS: Goal(True, 3, ""),
    STEP_OVERHEAD: Goal(False, 100, "us"),
    SLOWEST_STEP: Goal(False, 5, ""),
    LAYER_KERNELS: Goal(False, 16, ""),
    SAMPLER: Goal(False, 110, "us"),
    EAGLE_PASS: Goal(False, 1.3, ""),
}


class Figures:
    """Names and values of one stage, on disk after every one: a stage that is killed loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {}
        write(path, self.found)

    def put(self, name: str, value: Any) -> None:
        """A number, a text, or what JSON takes."""
        self.found[name] = round(value, 4 if abs(value) < 100 else 1) if isinstance(value, float) else value
        write(self._path, self.found)
        print(f"{name}: {self.found[name]}", flush=True)


def write(path: Path, content: Any) -> None:
    """As JSON, all of it or nothing."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)
