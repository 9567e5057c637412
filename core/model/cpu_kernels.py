"""Chooses what a CPU computes with: our kernels in C where they can be compiled, else PyTorch."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from specdec.sdk import ConfigError
from specdec.sdk.errors import message

from ..kernels.native.build import BuildError
from ..kernels.native.kernels import NativeKernels

logger = logging.getLogger("specdec")

CpuKernels = Literal["auto", "native", "torch"]


def kernels_for(device: torch.device, choice: CpuKernels = "auto") -> NativeKernels | None:
    """None where PyTorch computes; "auto" warns of that on a CPU.

    Raises ConfigError SD-E137 if there is no choice, or ours were asked for and cannot be had.
    """
    if device.type != "cpu" and choice != "auto":
        facts = {"found": choice, "device": device, "fix": "leave it out"}
        raise ConfigError("SD-E137", "cpu_kernels chooses what a CPU computes with", facts)
    if device.type != "cpu" or choice == "torch":
        return None
    try:
        return NativeKernels.load()
    except BuildError as error:
        facts = {"because": str(error)}
        if choice == "native":
            raise ConfigError("SD-E137", "the kernels for a CPU cannot be had", facts) from error
        facts |= {"so": "PyTorch computes, more slowly", "fix": "install gcc, or set cpu_kernels='torch'"}
        logger.warning("%s", message("SD-W304", "the kernels for a CPU cannot be had", facts))
        return None
