"""What one of torch's operators does on the emulated device, and what it costs there."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .structures import mapped, tensors_in
from .tensor import DeviceTensor

if TYPE_CHECKING:
    from .cuda import EmulatedCuda

CPU, META = torch.device("cpu"), torch.device("meta")
READS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "is_nonzero",
    "_unique2", "unique_dim", "unique_consecutive",
}  # fmt: skip
"""The host waits for a number, or for how many there are."""
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"_to_copy", "copy_"}
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_local_scalar_dense"}
ONE_KERNEL = {
    "scaled_dot_product_attention", "rms_norm", "layer_norm", "silu", "embedding", "softmax", "log_softmax",
    "searchsorted",
}  # fmt: skip
"""Composed of others in torch's books, and one kernel on a device."""


class Operators:
    """Called with an operator and its arguments, in the place of the operator."""

    def __init__(self, cuda: EmulatedCuda) -> None:
        self._cuda = cuda

    def __call__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ours = [each for each in tensors_in((args, kwargs)) if isinstance(each, DeviceTensor)]
        asked = kwargs.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
        if not ours and (asked is None or asked.type != "cuda"):
            return self._on_host(operator, args, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            name = operator.overloadpacket.__name__
            if name not in ONE_KERNEL and _is_composed(operator):
                with self._cuda.mode:
                    composed = operator.decompose(*args, **kwargs)
                if composed is not NotImplemented:
                    return composed
            if name in COPIES:
                return self._copy(operator, name, args, kwargs)
            return self._compute(operator, name, args, kwargs, ours)

    def _on_host(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs.get("pin_memory"):
            return operator(*args, **kwargs)
        return self._cuda.pin(operator(*args, **kwargs | {"pin_memory": False}))

    def _compute(
        self, operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], ours: list[DeviceTensor]
    ) -> Any:
        device = self._cuda.indexed(kwargs.get("device") or ours[0].device)
        self._check_places(operator, name, args, kwargs, device)
        if name in READS:
            self._cuda.wait(name)
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self._cuda.wait("repeat_interleave without output_size")
        elif name in INDEXES and any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(args[1])):
            self._cuda.wait(f"{name} by booleans")
        return self._run(operator, name, args, kwargs, ours, device)

    def _run(
        self,
        operator: Any,
        name: str,
        args: Any,
        kwargs: Any,
        ours: list[DeviceTensor],
        device: torch.device,
        *,
        launches: bool = True,
    ) -> Any:
        there, settings = mapped(args, held), {key: _held_argument(each) for key, each in kwargs.items()}
        settings.pop("pin_memory", None)

        def work() -> Any:
            return operator(*there, **settings)

        launches = 0 if name in NO_KERNEL or not launches else 1
        return self._cuda.finish(name, work, ours, device, launches)

    def _check_places(self, operator: Any, name: str, args: Any, kwargs: Any, device: torch.device) -> None:
        """As torch: all on one device, but for single numbers, and for indices, which it sends."""
        for each in tensors_in((args, kwargs)):
            if each.device in (device, META) or (each.device.type == "cpu" and each.dim() == 0 and name != "where"):
                continue
            if each.device.type == "cpu" and (name in INDEXES or (name == "where" and each.dim() == 0)):
                self._cuda.upload(each, f"{name} with a host tensor", non_blocking=False)
                continue
            found = f"{device} and {each.device}"
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {operator}")

    def _copy(self, operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Between devices, or to another dtype; `copy_` and `_to_copy`."""
        target = args[0] if name == "copy_" else None
        source = args[1] if name == "copy_" else args[0]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        to = target.device if target is not None else kwargs.get("device") or source.device
        if to.type == "cpu":
            values = held(source).to(kwargs.get("dtype") or source.dtype)
            return self._cuda.download(target, values, non_blocking=non_blocking)
        sent = not isinstance(source, DeviceTensor) and (name == "_to_copy" or source.dim() > 0)
        if sent:
            self._cuda.upload(source, "copy to the device", non_blocking=non_blocking)
        ours = [each for each in (target, source) if isinstance(each, DeviceTensor)]
        settings = {key: each for key, each in kwargs.items() if key != "non_blocking"}
        made = self._run(operator, name, args, settings, ours, self._cuda.indexed(to), launches=not sent)
        return made if target is None else target


@cache
def _is_composed(operator: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def held(tensor: Tensor) -> Tensor:
    """A tensor's data."""
    return tensor.held if isinstance(tensor, DeviceTensor) else tensor


def _held_argument(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) else mapped(value, held)
