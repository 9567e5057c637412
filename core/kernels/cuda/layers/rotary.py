"""Rotary embeddings, recognised by what they compute: a rotation waits for the attention that stores its keys.

Modelling code calls a function of its module. A layer whose function turns halves of heads gets a copy of its `forward`
in which that name means ours; modules and classes of the library stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, update_wrapper
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...layers import naive
from .deferred import Deferred, plain
from .operations import LayerKernels

NAME = "apply_rotary_pos_emb"
"""The function, by the name that transformers gives it."""

Rotate = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rotation:
    """Queries and keys of one layer that are not turned yet, token by token."""

    query: Tensor  # [N, Hq, D]
    keys: Tensor  # [N, Hkv, D]
    cos: Tensor  # [N, D]
    sin: Tensor  # [N, D]
    kernels: LayerKernels

    @property
    def waiting(self) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        return self.query, self.keys

    @cached_property
    def turned(self) -> tuple[Tensor, Tensor]:
        """Both, turned, where the cache is not what reads them."""
        return self.kernels.rotate(self.query, self.keys, self.cos, self.sin)

    def into_cache(self, values: Tensor, slots: Tensor, stored_keys: Tensor, stored_values: Tensor) -> Tensor:
        """Store keys and values; returns the turned queries. Arguments are those of `naive.rotate_and_store`."""
        return self.kernels.rotate_and_store(
            self.query, self.keys, plain(values), self.cos, self.sin, slots, stored_keys, stored_values
        )


class Rotated(Deferred):
    """Queries (place 0) or keys (1) that wait for their rotation: [1, H, N, D], or [N, H, D] by token.

    `heads[0].transpose(0, 1)`, which the attention function asks for, leads from the one to the other and computes
    nothing.
    """

    def __init__(self, like: Tensor, rotation: Rotation, place: int) -> None:
        self.rotation, self._place = rotation, place
        super().__init__(like, self._turned)

    def _turned(self) -> Tensor:
        turned = self.rotation.turned[self._place]
        return turned if self.dim() == 3 else turned.transpose(0, 1)[None]

    def __getitem__(self, index: Any) -> Tensor:
        if type(index) is int and self.dim() == 4:
            return _OfOneText(self.rotation, self._place)
        found: Tensor = super().__getitem__(index)
        return found


class _OfOneText(Deferred):
    """The same as [H, N, D]."""

    @staticmethod
    def __new__(cls: type[Self], rotation: Rotation, place: int) -> Self:
        return Deferred.__new__(cls, rotation.waiting[place].transpose(0, 1))

    def __init__(self, rotation: Rotation, place: int) -> None:
        super().__init__(self, lambda: rotation.turned[place].transpose(0, 1))
        self._rotation, self._place = rotation, place

    def transpose(self, *dims: Any) -> Tensor:
        if dims == (0, 1):
            return Rotated(self._rotation.waiting[self._place], self._rotation, self._place)
        found: Tensor = super().transpose(*dims)
        return found


def rotation_of(query: Tensor, keys: Tensor) -> Rotation | None:
    """That which both wait for. None if they do not."""
    if not (isinstance(query, Rotated) and isinstance(keys, Rotated)) or query.rotation is not keys.rotation:
        return None
    return query.rotation if query.is_waiting and keys.is_waiting else None


def defer_rotations(network: nn.Module, kernels: LayerKernels) -> None:
    """Let the rotations of every layer that turns halves of heads wait, in place."""
    waiting: dict[Any, FunctionType | None] = {}
    for module in network.modules():
        forward = vars(module).get("forward", type(module).forward)
        if isinstance(forward, FunctionType):
            if forward not in waiting:
                waiting[forward] = _with_waiting(forward, kernels)
            ours = waiting[forward]
            if ours is not None:
                module.forward = MethodType(ours, module)


def _with_waiting(forward: FunctionType, kernels: LayerKernels) -> FunctionType | None:
    """A layer's `forward` whose rotation waits. None if it has none of the common kind."""
    rotate = forward.__globals__.get(NAME) if NAME in forward.__code__.co_names else None
    if rotate is None or not _turns_halves(rotate):
        return None
    return _with_global(forward, NAME, partial(_wait, rotate, kernels))


def _wait(rotate: Rotate, kernels: LayerKernels, query: Tensor, keys: Tensor, *others: Any, **more: Any) -> Any:
    """In the place of `rotate`: its results, not yet computed where they are of the common kind."""
    if more or len(others) != 2 or torch.compiler.is_compiling() or not _is_common(query, keys, *others):
        return rotate(query, keys, *others, **more)
    cos, sin = others
    rotation = Rotation(query[0].transpose(0, 1), keys[0].transpose(0, 1), cos[0], sin[0], kernels)
    return Rotated(query, rotation, 0), Rotated(keys, rotation, 1)


def _is_common(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Heads [1, H, N, D] of one dtype, turned whole and alike."""
    one, _, num_tokens, dim = query.shape
    sizes = {query[:, 0].shape, keys[:, 0].shape, cos.shape, sin.shape}
    same_dtype = len({each.dtype for each in (query, keys, cos, sin)}) == 1
    return one == 1 and dim % 2 == 0 and same_dtype and sizes == {(1, num_tokens, dim)}


def _turns_halves(rotate: Rotate) -> bool:
    """Whether a function gives what `naive.rotate` gives, to the last bit."""
    g = torch.Generator().manual_seed(0)
    query, keys, cos, sin = (
        torch.randn(shape, generator=g) for shape in ((1, 2, 3, 8), (1, 1, 3, 8), *[(1, 3, 8)] * 2)
    )
    for dtype in (torch.float32, torch.bfloat16):
        given = [each.to(dtype) for each in (query, keys, cos, sin)]
        try:
            found = rotate(*given)
        except Exception:  # whatever it does, it is not called like this
            return False
        expected = naive.rotate(*(each[0].transpose(0, 1) for each in given[:2]), *(each[0] for each in given[2:]))
        if not all(torch.equal(each[0].transpose(0, 1), other) for each, other in zip(found, expected, strict=True)):
            return False
    return True


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """A copy of a function in which a global name means something else."""
    copy = FunctionType(
        function.__code__,
        function.__globals__ | {name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    return copy
