"""A model of several modalities that is given text only: what encodes the others leaves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn


class LeftOut(nn.Module):
    """Stands in the place of a module that text does not need."""


def leave_out_unused(model: Any, run: Callable[[], object]) -> None:
    """Take out what `run`, a pass of text, does not call, but nothing of the decoder or the head."""
    decoder = set(model.get_decoder().modules())
    places = _unused(model, _called(model, run) | {model.get_output_embeddings()}, decoder)
    for parent, name, _ in places:
        setattr(parent, name, LeftOut())
    try:
        run()
    except Exception:  # it is read, though not called
        for parent, name, module in places:
            setattr(parent, name, module)


def _called(model: nn.Module, run: Callable[[], object]) -> set[nn.Module]:
    called: set[nn.Module] = set()

    def note(module: nn.Module, args: object) -> None:
        called.add(module)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(note))
        run()
    return called


def _unused(
    parent: nn.Module, called: set[nn.Module], decoder: set[nn.Module]
) -> list[tuple[nn.Module, str, nn.Module]]:
    """The outermost modules, with their parents and names, of which no part is called."""
    found = []
    for name, child in parent.named_children():
        parts = set(child.modules())
        if parts.isdisjoint(called | decoder):
            found.append((parent, name, child))
        elif child not in decoder:
            found += _unused(child, called, decoder)
    return found
