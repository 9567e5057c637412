"""Tensors inside of arguments and results: lists, dictionaries, dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def tensors_in(value: Any) -> list[Tensor]:
    """Each tensor, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, PLAIN):
        return
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _collect(getattr(value, field.name), found)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        made = [mapped(each, change) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {name: mapped(each, change) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        copy = object.__new__(type(value))
        for field in fields(value):
            object.__setattr__(copy, field.name, mapped(getattr(value, field.name), change))
        return copy
    return value
