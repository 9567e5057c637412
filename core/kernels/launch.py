"""How kernels are compiled and launched: pinned here, because each of these can change bits or registers."""

from __future__ import annotations

from typing import Any

TILE = 8192  # logits per program of a streaming pass: 64 per thread, which hides the reductions
STREAMING: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
PER_ROW: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least count (at least 1)."""
    return 1 << max(0, count - 1).bit_length()
