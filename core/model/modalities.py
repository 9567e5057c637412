"""A model of several modalities that is given text only: what encodes the others leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .hidden_states import passed_through


class LeftOut(nn.Module):
    """Stands in the place of a module that text does not need."""


def leave_out_unused(model: Any, run: Callable[[], object]) -> None:
    """Take out what `run`, a pass of text, does not call, but nothing of the decoder or the head."""
    decoder = set(model.get_decoder().modules())
    called = {*passed_through(model.modules(), run), model.get_output_embeddings()}
    places = _unused(model, called, decoder)
    for parent, name, _ in places:
        setattr(parent, name, LeftOut())
    try:
        run()
    except Exception:  # it is read, though not called
        for parent, name, module in places:
            setattr(parent, name, module)


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
