"""What differs between devices, chosen once: everything else asks the profile and not the device's type."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from specdec.sdk.errors import ConfigError
from specdec.sdk.types import TargetInfo

from ..cache.addressing import Addressing
from ..cache.row_table import RowTable
from ..config.engine_config import EngineConfig
from ..device_memory import spare_memory
from ..kernels.backend import Backend, backend_of
from ..model.target import TargetModel
from ..model.text_equality import ON_A_GPU, TextEquality
from .memory import left_by_a_step
from .threads import Threads

CpuKernels = Literal["auto", "native", "torch"]
Working = Callable[[], AbstractContextManager[object]]

logger = logging.getLogger("specdec")

DRIVERS = ("/dev/nvidia0", "/dev/kfd")
"""What drivers of GPUs put into the file system, by which one is known that torch does not see."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device, and what an engine does its own way there."""

    device: torch.device
    backend: Backend
    default_dtype: torch.dtype | None  # None: the checkpoint's own
    current: Working  # inside, what asks for no device by name gets this one
    kv_budget: Callable[[EngineConfig, TargetModel, int], int]  # bytes for the KV cache where the user names none
    threads: Callable[[int | None, Any], Threads]  # of what was asked for, and a model
    text_equality: Callable[[torch.dtype], TextEquality]  # of a model whose every layer the backend computes

    @property
    def keeps_drafts(self) -> bool:
        """Whether drafts wait there for their verification: where nothing that a pass needs is read by the host."""
        return self.backend.addressing is not None

    def working(self, threads: Threads) -> Working:
        """What an engine's calls happen in: the device as the current one, and its number of threads if it has one."""
        return partial(_with_threads, self.current, threads) if threads.chosen else self.current

    def addressing(self, rows: RowTable, info: TargetInfo, lookahead: int) -> Addressing:
        """How passes find the blocks of these rows. lookahead: positions past the newest token that drafts write."""
        if self.backend.addressing is None:
            return Addressing(rows, self.backend)
        width = -(-(info.max_model_len + lookahead) // rows.pool.block_size)
        addressing: Addressing = self.backend.addressing(rows, info.max_num_seqs, width, torch.device(info.device))
        return addressing

    def capture(self, asked: bool | None, target_waits: bool, max_num_seqs: int, max_tokens: int) -> Any:
        """What warms passes up and captures them. None where the device has none of that.

        asked: as `EngineConfig.cuda_graphs`. target_waits: as `TargetModel.waits_for_experts`. Raises ConfigError
        SD-E147, SD-E234 if they were asked for in vain.
        """
        if self.backend.passes is not None:
            return self.backend.passes.of(asked, self.device, target_waits, max_num_seqs, max_tokens)
        if asked:
            raise ConfigError("SD-E147", f"cuda_graphs were asked for, and device {str(self.device)!r} has none")
        return None

    def dtype(self, asked: str, stored: torch.dtype | None) -> torch.dtype:
        """asked: as in `EngineConfig`. stored: the checkpoint's. None means that it states none."""
        named: torch.dtype | None = None if asked == "auto" else getattr(torch, asked)
        return named or self.default_dtype or stored or torch.bfloat16


def profile_of(device: torch.device, cpu_kernels: CpuKernels = "auto") -> DeviceProfile:
    """cpu_kernels: as in `EngineConfig`; "auto" warns where a CPU has none.

    Raises ConfigError SD-E137 if there is no choice, or kernels in C were asked for and cannot be had.
    """
    return PROFILES.get(device.type, _of_gpu)(device, cpu_kernels)


def device_of(name: str) -> torch.device:
    """The device of a name, or the best one for "auto"; one of several with its index. Raises ConfigError SD-E147."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if why := why_no_gpu():
            logger.warning("the CPU serves: %s", why)
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError("SD-E147", f"device {name!r} was asked for, and torch finds no CUDA device")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise ConfigError("SD-E147", f"device {name!r} was asked for", {"found": f"cuda:0 to cuda:{count - 1}"})
    return torch.device("cuda", index)


def require_host_default() -> None:
    """Raise ConfigError SD-E346 if tensors of no stated device would not be the host's."""
    found = torch.get_default_device()
    if found.type != "cpu":
        facts = {"found": found, "expected": "cpu", "fix": 'torch.set_default_device("cpu"), and LLM(device=)'}
        raise ConfigError("SD-E346", "PyTorch's default device is not the host", facts)


def why_no_gpu() -> str | None:
    """Why torch does not use a GPU that is in this machine. None: it does, or none is seen."""
    if torch.cuda.is_available() or not any(Path(driver).exists() for driver in DRIVERS):
        return None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else torch.version.hip and f"ROCm {torch.version.hip}"
    if built:
        return f"the machine has a GPU, and torch {torch.__version__} finds none: its driver may be too old for {built}"
    return f"the machine has a GPU, and torch {torch.__version__} is a build for CPUs"


def _of_cpu(device: torch.device, cpu_kernels: CpuKernels) -> DeviceProfile:
    backend = backend_of(device.type).load(cpu_kernels)
    if cpu_kernels == "native" and not backend.is_batch_invariant:
        raise ConfigError("SD-E137", "the kernels for a CPU cannot be had", {"because": "their package is missing"})
    return DeviceProfile(
        device,
        backend,
        default_dtype=torch.float32,
        current=nullcontext,
        kv_budget=lambda *_: spare_memory(device),  # untouched pages cost a CPU nothing
        threads=Threads.choose,
        text_equality=partial(TextEquality.of_cpu, backend=backend),
    )


def _of_gpu(device: torch.device, cpu_kernels: CpuKernels) -> DeviceProfile:
    if cpu_kernels != "auto":
        facts = {"found": cpu_kernels, "device": device, "fix": "leave it out"}
        raise ConfigError("SD-E137", "cpu_kernels chooses what a CPU computes with", facts)
    with torch.cuda.device(device) if torch.cuda.is_available() else nullcontext():  # where a kernel is tried
        backend = backend_of(device.type).load(cpu_kernels)
    return DeviceProfile(
        device,
        backend,
        default_dtype=None,
        current=partial(torch.cuda.device, device),
        kv_budget=left_by_a_step,
        threads=lambda asked, model: Threads(asked, None),
        text_equality=lambda dtype: ON_A_GPU,
    )


@contextmanager
def _with_threads(current: Working, threads: Threads) -> Iterator[None]:
    with current(), threads.used():
        yield


PROFILES: dict[str, Callable[[torch.device, CpuKernels], DeviceProfile]] = {"cpu": _of_cpu, "cuda": _of_gpu}
"""What makes a profile, for each type of device."""
