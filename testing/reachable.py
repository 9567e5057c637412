"""What an object holds on to: for finding requests that were not let go, and for measuring growth."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sized
from logging import Logger
from types import FunctionType, ModuleType

import torch

from specdec.core.host import EngineServices

from .fakes import FakeServices

NOT_HELD = (type, ModuleType, FunctionType, Logger, EngineServices, FakeServices)
NOT_ITS_OWN = ("specdec.core.", "specdec.sdk.", "torch.", "transformers.", "builtins")  # where classes are from
CLOSED = (torch.Tensor, str, bytes)


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
    """Everything that an object holds through attributes and containers: not code, and not what the engine provides.

    Its class, and those of networks, hold too. A library's network holds other networks only.
    """
    seen: set[int] = set()
    waiting = [owner]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, NOT_HELD):
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, dict):  # the collector is not told of keys that are texts
            waiting += each.keys()
        own = [base for base in type(each).__mro__ if not base.__module__.startswith(NOT_ITS_OWN)]
        if isinstance(each, torch.nn.Module) and type(each) not in own:
            waiting += each.children()
        elif not isinstance(each, CLOSED):
            waiting += gc.get_referents(each)
        if each is owner or isinstance(each, torch.nn.Module):
            waiting += (value for base in own for value in vars(base).values())
