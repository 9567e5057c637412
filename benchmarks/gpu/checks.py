"""Whether what runs is right: the tests that need a device, NVIDIA's checker of memory, its counters.

Kernels are compiled where they are first called, so tests are dealt to several processes where pytest-xdist is there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys

from . import ROOT
from .run import Run

TESTS = {
    "kernels": ["tests/gpu/test_kernels.py"],
    "engine": ["tests/gpu/test_engine.py", "tests/gpu/test_streams.py"],
}
CHECKED = "test_paged_attention and decode and causal and 128 or test_the_sampler_draws and 4096"
COUNTED = "regex:attend_pages|verdict|row_stats|rms_norm"
METRICS = "dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum"


def kernel_tests(run: Run) -> None:
    """tests/gpu, kernel by kernel."""
    _tests(run, "kernels", *_dealt(12))


def engine_tests(run: Run) -> None:
    """tests/gpu, whole engines."""
    _tests(run, "engine", *_dealt(6))


def sanitizer(run: Run) -> None:
    """compute-sanitizer's memcheck on one verification and one attention."""
    _with_tool(run, "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")


def counters(run: Run) -> None:
    """ncu's share of the memory's throughput of kernels that stream."""
    _with_tool(
        run, "ncu", "--clock-control", "none", "--kernel-name", COUNTED, "--launch-count", "12", "--metrics", METRICS
    )


def _dealt(most: int) -> list[str]:
    """To so many processes at most."""
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-p", "xdist", "-n", str(min(most, os.cpu_count() or 1)), "--dist", "worksteal"]


def _tests(run: Run, which: str, *options: str, before: tuple[str, ...] = ()) -> None:
    """Counts of outcomes; what pytest prints comes as it prints it. Raises SystemExit where a test fails."""
    source = str(ROOT / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", source), source])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some warn of one another, and a warning is an error here
    environment.setdefault("OMP_NUM_THREADS", "1")  # of each process: there are many
    command = [*before, sys.executable, "-u", "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += [
        *TESTS[which],
        "--confcutdir",
        "tests/gpu",
        "--override-ini",
        "addopts=--import-mode=importlib",
        *options,
    ]
    if run.smoke:
        command += ["--collect-only"]
    testing = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert testing.stdout is not None
    line = ""
    for line in testing.stdout:
        print(line, end="", flush=True)
    for count, outcome in re.findall(r"(\d+) (passed|failed|skipped|error|tests? collected)", line):
        run.figures.put(f"tests of {which}: {outcome}", int(count))
    if testing.wait() != 0:
        raise SystemExit(f"{command[0]} ended with status {testing.returncode}; its log is above")


def _with_tool(run: Run, tool: str, *options: str) -> None:
    found = shutil.which(tool) or shutil.which(tool, path="/usr/local/cuda/bin")
    if found is None or run.smoke:
        run.figures.put(tool, "not run: no device" if run.smoke else "not run: not installed")
        return
    _tests(run, "kernels", "-k", CHECKED, before=(found, *options))
    run.figures.put(tool, "no fault found" if tool != "ncu" else "see the log")
