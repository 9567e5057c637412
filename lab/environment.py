"""What figures depend on: versions, the machine and its other programs, the source of a proposer."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specdec.sdk.lifecycle import SDK_DISTRIBUTION

MOST_LOAD = 1.0  # programs that are ready to run, for each processor
MOST_WAITED = 0.05  # share of a proposer's time


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "specdec": version(SDK_DISTRIBUTION),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "platform": platform.platform(),
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu_model": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def load_per_core() -> float | None:
    """Programs that were ready to run in the last minute, for each processor. None: the system does not tell."""
    return None if sys.platform == "win32" else os.getloadavg()[0] / (os.cpu_count() or 1)


def machine_facts(load: float | None, waited_share: float | None = None) -> dict[str, Any]:
    """What a result says of the machine's other programs.

    load: of `load_per_core`, before anything was measured. waited_share: of the proposers' time, what others took.
    """
    busy = (load or 0.0) > MOST_LOAD or (waited_share or 0.0) > MOST_WAITED
    return {"load_per_core": load, "waited_share": waited_share, "is_busy": busy}


def source_sha256(target: str | None) -> str | None:
    """Hash the file of a loaded "module:Class". None means that there is no class, or no Python file of it."""
    module = sys.modules.get((target or "").partition(":")[0])
    try:
        path = inspect.getsourcefile(module) if module else None
    except TypeError:  # a module without a file
        path = None
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
