"""Numbers on their way to a device, without the host waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(lists: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    """Several lists in one transfer, one tensor each. From pinned memory: copies from any other are waited for."""
    flat = torch.tensor([value for values in lists for value in values], dtype=dtype, pin_memory=device.type != "cpu")
    return list(torch.split(flat.to(device, non_blocking=True), [len(values) for values in lists]))
