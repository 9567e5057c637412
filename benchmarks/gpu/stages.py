"""The stages, in the order in which they are worth most, each with its limit in seconds."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    """One subprocess."""

    name: str
    work: str  # module:function, called with a `Run`
    limit: float  # seconds; a stage that takes longer is ended, and keeps what it found

    def command(self, figures: Path, models: Path, *, smoke: bool) -> list[str]:
        """What runs it."""
        command = [sys.executable, "-m", "benchmarks.gpu.stage", self.work, str(figures), str(models)]
        return [*command, f"--limit={self.limit}", *(["--smoke"] if smoke else [])]


STAGES = (
    Stage("machine", "benchmarks.gpu.machine:measure", 50),
    Stage("kernel_tests", "benchmarks.gpu.checks:kernel_tests", 120),
    Stage("engine_tests", "benchmarks.gpu.checks:engine_tests", 150),
    Stage("speed_1B", "benchmarks.gpu.speed:of_1b", 150),
    Stage("sanitizer", "benchmarks.gpu.checks:sanitizer", 100),
    Stage("step_8B", "benchmarks.gpu.steps:one_step", 120),
    Stage("speed_8B", "benchmarks.gpu.speed:of_8b", 150),
    Stage("mixed_8B", "benchmarks.gpu.steps:mixed", 100),
    Stage("sampler", "benchmarks.gpu.kernels:sampler", 60),
    Stage("attention", "benchmarks.gpu.kernels:attention", 100),
    Stage("drafters_greedy", "benchmarks.gpu.drafting:greedy", 200),
    Stage("drafters_probabilistic", "benchmarks.gpu.drafting:probabilistic", 200),
    Stage("compile_8B", "benchmarks.gpu.steps:compiled", 160),
    Stage("counters", "benchmarks.gpu.checks:counters", 120),
)
