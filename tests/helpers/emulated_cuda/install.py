"""Puts the emulated device into `torch.cuda`, and takes it out again."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._device
import torch.utils._triton
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .cuda import EmulatedCuda
from .graphs import Event, Graph, Stream
from .guard import register_guard
from .tensor import DeviceTensor

GIB = 1 << 30


@contextmanager
def emulated_cuda(num_devices: int = 1, memory: int = 64 * GIB, *, poison: bool = True) -> Iterator[EmulatedCuda]:
    """Inside, torch finds CUDA devices. Engines and tensors that were made there must not be used after.

    memory: bytes of each device, counted and not taken.
    poison: fill memory of graphs that nobody may read any more, so that whoever reads it shows.
    """
    register_guard()
    torch.utils._triton.has_triton()  # remembered from now on: what this machine has, and torch's own functions
    torch.utils._device._device_constructors()
    cuda = EmulatedCuda(num_devices, memory, poison=poison)
    with ExitStack() as stack:
        for name, value in _of_torch_cuda(cuda).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for kind in (Stream, Event, Graph):
            stack.enter_context(patch.object(kind, "cuda", cuda, create=True))
        stack.enter_context(patch.object(torch.cuda.graph, "default_capture_stream", None))
        stack.enter_context(patch.object(torch._C, "_host_emptyCache", lambda: None, create=True))
        stack.enter_context(patch.object(DeviceTensor, "dispatch", staticmethod(cuda.run), create=True))
        stack.enter_context(patch.object(torch, "load", _loading(torch.load)))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, _made_from_numbers(getattr(torch, name), cuda)))
        convert = torch.__future__.get_overwrite_module_params_on_conversion()
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, convert)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(patch("safetensors.safe_open", _safe_open()))
        # Models are loaded by this thread, which has the mode. Memory to begin with is for devices of GiBs.
        stack.enter_context(patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"))
        stack.enter_context(patch("transformers.modeling_utils.caching_allocator_warmup", lambda *_: None))
        stack.enter_context(cuda.mode)
        yield cuda


def _of_torch_cuda(cuda: EmulatedCuda) -> dict[str, Any]:
    def heap(device: Any = None) -> Any:
        return cuda.heaps[cuda.device_of(device).index]

    def properties(device: Any = None) -> Any:
        return SimpleNamespace(
            name="an emulated device", major=9, minor=0, multi_processor_count=132, total_memory=heap(device).total
        )

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: cuda.num_devices,
        "current_device": lambda: cuda.current,
        "_exchange_device": cuda.exchange,
        "_maybe_exchange_device": cuda.exchange,
        "set_device": lambda device: cuda.exchange(cuda.device_of(device).index),
        "current_stream": cuda.current_stream,
        "default_stream": cuda.default_stream,
        "set_stream": cuda.set_stream,
        "synchronize": lambda device=None: cuda.wait("synchronize") if cuda._records() else None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (heap(device).total - heap(device).used, heap(device).total),
        "memory_reserved": lambda device=None: heap(device).used,
        "memory_allocated": lambda device=None: heap(device).used,
        "max_memory_reserved": lambda device=None: heap(device).peak,
        "reset_peak_memory_stats": lambda device=None: setattr(heap(device), "peak", heap(device).used),
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": cuda._records,
        "graph_pool_handle": object,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
    }


def _made_from_numbers(real: Callable[..., Any], cuda: EmulatedCuda) -> Callable[..., Any]:
    """`torch.tensor` and its like: from host memory, pinned if that is asked for, to the device."""

    @functools.wraps(real)
    def make(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        place = _device_of_context() if device is None else torch.device(device)
        if isinstance(data, DeviceTensor) or (not pin_memory and (place is None or place.type != "cuda")):
            return real(data, *args, device=device, **options)
        with torch._C.DisableTorchFunction():  # on the host, whatever the device of the context
            made = real(data, *args, **options)
        if pin_memory:
            cuda.pin(made)
        return made if place is None or place.type != "cuda" else made.to(cuda.indexed(place))

    return make


def _device_of_context() -> torch.device | None:
    """That of the innermost `with torch.device(...)`."""
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return contexts[-1].device if contexts else None


def _loading(real: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` of a file with tensors by name: here it reads, and torch copies."""

    @functools.wraps(real)
    def load(file: Any, *args: Any, map_location: Any = None, **options: Any) -> Any:
        if map_location is None or torch.device(map_location).type != "cuda":
            return real(file, *args, map_location=map_location, **options)
        found = real(file, *args, map_location="cpu", **options)
        return {name: each.to(map_location) for name, each in found.items()}

    return load


def _safe_open() -> Any:
    """The reader of checkpoints, which copies to a device by itself: here it reads, and torch copies."""
    import safetensors

    class Opened:
        def __init__(self, file: Any, framework: str, device: str = "cpu") -> None:
            self._opened, self._device = Opened.real(file, framework=framework, device="cpu"), device

        real = safetensors.safe_open

        def __enter__(self) -> Opened:
            self._opened = self._opened.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._opened.__exit__(*error)

        def keys(self) -> Any:
            return self._opened.keys()

        def get_slice(self, name: str) -> Any:
            return self._opened.get_slice(name)

        def get_tensor(self, name: str) -> Any:
            return self._opened.get_tensor(name).to(self._device)

    return Opened
