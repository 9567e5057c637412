"""Token ids that somebody's code returned, as ints. Nothing is rounded, cut or parsed."""

from __future__ import annotations

import operator
from typing import Any


def token_id(value: Any) -> int:
    """An integer of Python, of NumPy, or of a tensor with one element. Raises TypeError for all else, bools too."""
    if type(value) is int:
        return value
    import torch

    is_bool = value.dtype == torch.bool if isinstance(value, torch.Tensor) else isinstance(value, bool)
    if not is_bool:
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"a draft holds {value!r} ({type(value).__name__}); a token id is an integer, and no bool is one")
