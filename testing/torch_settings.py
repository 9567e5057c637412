"""Settings of torch that belong to the whole process: a check leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .report import SETTINGS_CHANGED, Violation

SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "set_num_threads": (torch.get_num_threads, torch.set_num_threads),
}


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put back what changes inside. Raises Violation for it, in the place of an exception that it led to."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    changed = {}
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    finally:
        for name, (read, write) in SETTINGS.items():
            if read() != before[name]:
                changed[name] = read()
                write(before[name])
    if changed:
        raise Violation(
            expected=f"the settings of torch as they were: {', '.join(f'{name}({before[name]})' for name in changed)}",
            found=", ".join(f"torch.{name}({value})" for name, value in changed.items()),
            fix="leave what the whole process shares as it is: name the dtype of each tensor; "
            "torch.no_grad() as a context",
            cause=SETTINGS_CHANGED,
        ) from error
    if error is not None:
        raise error
