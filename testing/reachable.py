"""What an object holds on to: for finding requests that were not let go, and for measuring growth."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sized
from types import FunctionType, ModuleType

import torch

from specdec.core.host import EngineServices

from .fakes import FakeServices

NOT_HELD = (type, ModuleType, FunctionType, EngineServices, FakeServices)
NOT_ITS_OWN = ("specdec.sdk.", "torch.", "builtins")  # modules of bases
CLOSED = (torch.Tensor, torch.nn.Module, str, bytes)


def holds(owner: object, text: str) -> bool:
    """Whether a string can be reached from an object."""
    return any(each == text for each in reachable(owner) if isinstance(each, str))


def size(owner: object) -> int:
    """Entries of all containers and tensors that can be reached from an object."""
    entries = 0
    for each in reachable(owner):
        if isinstance(each, torch.Tensor):
            entries += each.numel()
        elif isinstance(each, Sized) and not isinstance(each, str | bytes | torch.nn.Module):
            entries += len(each)
    return entries


def reachable(owner: object) -> Iterator[object]:
    """Everything that an object and its class hold through attributes and containers: not code, and not what the
    engine provides.
    """
    seen: set[int] = set()
    bases = [base for base in type(owner).__mro__ if not base.__module__.startswith(NOT_ITS_OWN)]
    waiting = [owner, *(value for base in bases for value in vars(base).values())]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, NOT_HELD):
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, dict):  # the collector is not told of keys that are texts
            waiting += each.keys()
        if not isinstance(each, CLOSED):
            waiting += gc.get_referents(each)
