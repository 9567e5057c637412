"""Whether what runs is right: the tests that need a device, NVIDIA's checker of memory, its counters."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from . import ROOT
from .run import Run

TESTS = {"kernels": "tests/gpu/test_kernels.py", "engine": "tests/gpu/test_engine.py"}
CHECKED = "test_paged_attention and decode and causal and 128 or test_the_sampler_draws and 4096"
COUNTED = "regex:attend_pages|verdict|row_stats|rms_norm"
METRICS = "dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum"


def kernel_tests(run: Run) -> None:
    """tests/gpu, kernel by kernel."""
    _tests(run, "kernels")


def engine_tests(run: Run) -> None:
    """tests/gpu, whole engines."""
    _tests(run, "engine")


def sanitizer(run: Run) -> None:
    """compute-sanitizer's memcheck on one verification and one attention."""
    _with_tool(run, "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")


def counters(run: Run) -> None:
    """ncu's share of the memory's throughput of kernels that stream."""
    _with_tool(run, "ncu", "--kernel-name", COUNTED, "--launch-count", "12", "--metrics", METRICS)


def _tests(run: Run, which: str, *options: str, before: tuple[str, ...] = ()) -> None:
    """Counts of outcomes. Raises SystemExit where a test fails."""
    source = str(ROOT / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", source), source])}
    command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += [
        TESTS[which],
        "--confcutdir",
        "tests/gpu",
        "--override-ini",
        "addopts=--import-mode=importlib",
        *options,
    ]
    if run.smoke:
        command += ["--collect-only"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-20000:], done.stderr[-5000:], sep="\n", flush=True)
    for count, outcome in re.findall(r"(\d+) (passed|failed|skipped|error|tests? collected)", done.stdout):
        run.figures.put(f"tests of {which}: {outcome}", int(count))
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with status {done.returncode}; its log is above")


def _with_tool(run: Run, tool: str, *options: str) -> None:
    found = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
    if found is None or run.smoke:
        run.figures.put(tool, "not run: no device" if run.smoke else "not run: not installed")
        return
    _tests(run, "kernels", "-k", CHECKED, before=(found, *options))
    run.figures.put(tool, "no fault found" if tool != "ncu" else "see the log")
