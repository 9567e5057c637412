"""Tensors that say `cuda:0` and hold their data on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .memory import Stretch

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class DeviceTensor(torch.Tensor):
    """Its operators go to the emulated device that is installed."""

    dispatch: ClassVar[Dispatch]  # set while a device is installed
    held: Tensor  # on the host: the data
    stretch: Stretch  # of the device's memory, shared with the views of it

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device, stretch: Stretch) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=device,
        )
        made.held, made.stretch = held, stretch
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return DeviceTensor.dispatch(operator, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:  # by name only: values would be a wait
        return f"DeviceTensor({list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def cpu(self, memory_format: Any = torch.preserve_format) -> Tensor:
        return self.to(torch.device("cpu"))

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = __dlpack__ = numpy

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def pin_memory(self, *args: Any) -> Tensor:
        raise RuntimeError(f"cannot pin memory of a tensor on {self.device}")

    def _get_data(self) -> Tensor:
        return self.detach()

    def _set_data(self, other: DeviceTensor) -> None:
        torch.Tensor.data.__set__(self, other)
        self.held, self.stretch = other.held, other.stretch

    data = property(_get_data, _set_data)
