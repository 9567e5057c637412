"""What the machine is, and what its smallest operations cost."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version

import torch

from .run import Run

PACKAGES = ("torch", "triton", "transformers", "pydantic", "safetensors", "numpy", "pytest")
LAUNCHES = 1000


def measure(run: Run) -> None:
    """Versions, copy bandwidth, a launch, a node of a graph, a wait."""
    put = run.figures.put
    put("python", platform.python_version())
    for package in PACKAGES:
        try:
            put(package, version(package))
        except PackageNotFoundError:
            put(package, "not installed")
    put("device", "cpu" if run.smoke else torch.cuda.get_device_name())
    if not run.smoke:
        properties = torch.cuda.get_device_properties(0)
        put("compute capability", f"{properties.major}.{properties.minor}")
        put("processors", properties.multi_processor_count)
        put("memory, GiB", properties.total_memory / 2**30)
    put("copy bandwidth, GB/s", run.bandwidth() / 1e9)
    one = torch.zeros(1, device=run.device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    run.seconds(launch)
    started = time.perf_counter()
    launch()
    put("a launch on the host, us", (time.perf_counter() - started) / LAUNCHES * 1e6)
    run.wait()
    put("a node of a graph, us", run.device_seconds(launch, times=3) / LAUNCHES * 1e6)
    put("a wait for one number, us", min(run.seconds(lambda: one.add_(1).item()) for _ in range(50)) * 1e6)
