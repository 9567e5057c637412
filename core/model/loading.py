"""How a model is loaded, and the one place that turns whatever this raises into an error of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import is_accelerate_available

from specdec.sdk.errors import ConfigError, SpecdecError

_LONGEST_REASON = 300  # characters; modelling code is quoted in some messages


@contextmanager
def loading(code: str, what: str, fixes: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise ConfigError `code` from anything but our own errors: damaged files make libraries raise every kind.

    `fixes`: what to do about an error whose text has the key in it.
    """
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        because = _reason(error)
        facts = {"because": because}
        known = _LIBRARY_MISSING if isinstance(error, ImportError) else fixes or {}
        facts |= {"fix": next((fix for part, fix in known.items() if part in str(error)), "")}
        raise ConfigError(code, what, {label: fact for label, fact in facts.items() if fact}) from error


def straight_to(device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told of a device, so that converted weights go there one by one.

    transformers needs accelerate for that. Without it they are all in host memory first. Weights that are served as
    they are stored never are: they are pages of their file.
    """
    return {"device_map": device} if device.type != "cpu" and is_accelerate_available() else {}


_LIBRARY_MISSING = {"": "install the library that `because` names, or take a checkpoint that needs none"}


def _reason(error: Exception) -> str:
    """The kind of error and the first lines of its text."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST_REASON:
        text = text[:_LONGEST_REASON] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
