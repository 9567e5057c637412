"""Drafts in the form that SGLang verifies: every request has as many tokens, and a mask says what follows what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def as_chains(
    newest: Sequence[int], drafts: Sequence[Sequence[int]], width: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of `width` tokens, and which of the same row each follows or is.

    What fills a row follows nothing, so that it can never be accepted, not even where it is what the target says.
    """
    ids = np.zeros((len(newest), width), dtype=np.int64)
    sees = np.broadcast_to(np.eye(width, dtype=np.bool_), (len(newest), width, width)).copy()
    chain = np.tri(width, dtype=np.bool_)
    for b, (token, draft) in enumerate(zip(newest, drafts, strict=True)):
        size = 1 + len(draft)
        ids[b, :size] = [token, *draft]
        sees[b, :size, :size] = chain[:size, :size]
    return ids.reshape(-1), sees.reshape(-1)
