"""Functions of vLLM in whose place others stand, which are given the original."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def around(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of `original`: the replacement, which gets it before the arguments."""

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return wrapped


def wrap(runner_class: type, name: str, replacement: Callable[..., Any], drafter: str, drafter_class: type) -> None:
    """Replace a method for runners whose attribute `drafter` is of `drafter_class`; others behave as before.

    The replacement gets the drafter, the original method, the runner and the arguments.
    """

    def chosen(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(runner, drafter, None)
        if not isinstance(ours, drafter_class):
            return original(runner, *args, **kwargs)
        return replacement(ours, original, runner, *args, **kwargs)

    setattr(runner_class, name, around(getattr(runner_class, name), chosen))
