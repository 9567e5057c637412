"""Methods of vLLM's runners that do something else where the drafter is one of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap(runner_class: type, name: str, replacement: Callable[..., Any], drafter: str, drafter_class: type) -> None:
    """Replace a method for runners whose attribute `drafter` is of `drafter_class`; others behave as before.

    The replacement gets the drafter, the original method, the runner and the arguments.
    """
    original = getattr(runner_class, name)

    @wraps(original)
    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(runner, drafter, None)
        if not isinstance(ours, drafter_class):
            return original(runner, *args, **kwargs)
        return replacement(ours, original, runner, *args, **kwargs)

    setattr(runner_class, name, wrapped)
