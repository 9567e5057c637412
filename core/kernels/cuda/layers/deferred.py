"""Results that wait for their reader, who may compute them together with what is next.

Modelling code computes step by step: a sum, then its norm; SiLU, then its product; a rotation, then what stores it. A
result that waits lets the second step do both. Whoever else reads it gets the values, computed then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_GETTERS: tuple[Any, ...] = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.is_cuda)
_METADATA = frozenset(getter.__get__ for getter in _GETTERS) | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
}
_ADDITIONS = frozenset({Tensor.add, torch.add})
_PRODUCTS = frozenset({Tensor.mul, torch.mul})


class Deferred(Tensor):
    """A tensor without storage. Any operation on it computes its values first, once; its sizes are known before."""

    @staticmethod
    def __new__(cls: type[Self], like: Tensor, *_: Any) -> Self:
        """`like`: a tensor of the result's shape, dtype and device."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    def __init__(self, like: Tensor, compute: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = compute
        self._result: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """As a plain tensor."""
        if self._result is None:
            assert self._make is not None, "one of both is there"
            self.settle(self._make())
        assert self._result is not None, "settled above"
        return self._result

    @property
    def is_waiting(self) -> bool:
        """Whether nothing has computed it."""
        return self._result is None

    def settle(self, result: Tensor) -> None:
        """Whoever computes it says what came out; what it was made from is let go."""
        self._result, self._make = result, None

    def plus(self, other: Tensor) -> Tensor | None:
        """Its sum with a tensor, in a form that waits. None: there is no such form."""
        return None

    def times(self, other: Tensor) -> Tensor | None:
        """Likewise its product."""
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch in the place of any function that gets one."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if len(args) == 2 and not kwargs and func in _ADDITIONS | _PRODUCTS:
            found = _combined(func, *args)
            if found is not None:
                return found
        args, kwargs = tree_map_only(Deferred, lambda each: each.result, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's stub has the default implementation's type
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """What passes by the door above gets values as well."""
        args, kwargs = tree_map_only(Deferred, lambda each: each.result, (args, kwargs or {}))
        return func(*args, **kwargs)


class Addend(Deferred):
    """Values that are there, and whose sum with a residual stream waits for the norm behind it."""

    def __init__(self, values: Tensor) -> None:
        self._make, self._result = None, values

    def plus(self, other: Tensor) -> Tensor | None:
        """See `Deferred`."""
        return Sum(other, self.result) if (other.shape, other.dtype) == (self.shape, self.dtype) else None


class Sum(Deferred):
    """Of a residual stream and what a block adds to it."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.parts = plain(first), plain(second)
        super().__init__(first, lambda: torch.add(*self.parts))

    def settle(self, result: Tensor) -> None:
        """See `Deferred`."""
        super().settle(result)
        del self.parts


class Activated(Deferred):
    """A gate's activation, which waits for what it gates."""

    def __init__(self, gate: Tensor, activate: Callable[[Tensor], Tensor], multiply: Callable[..., Tensor]) -> None:
        super().__init__(gate, lambda: activate(gate))
        self._gate, self._multiply = gate, multiply

    def times(self, other: Tensor) -> Tensor | None:
        """See `Deferred`."""
        same = (other.shape, other.dtype) == (self.shape, self.dtype)
        return self._multiply(self._gate, plain(other)) if same else None


def plain(tensor: Tensor) -> Tensor:
    """A tensor with its values."""
    return tensor.result if isinstance(tensor, Deferred) else tensor


def _combined(func: Any, first: Any, second: Any) -> Tensor | None:
    for each, other in ((first, second), (second, first)):
        if isinstance(each, Deferred) and isinstance(other, Tensor):
            found = each.plus(other) if func in _ADDITIONS else each.times(other)
            if found is not None:
                return found
    return None
