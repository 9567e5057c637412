"""The machine and the versions that times depend on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

SDK_DISTRIBUTION = "specdec-sdk"


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
