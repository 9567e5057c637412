"""How kernels are compiled and launched: pinned here, because each of these can change bits or registers."""

from __future__ import annotations

from typing import Any

import torch

TILE = 8192  # logits per program of a streaming pass: 64 per thread, which hides the reductions


def registers(count: int) -> dict[str, Any]:
    """The most that a thread may use. Without a bound, ptxas spills a few to fit in more threads; ROCm has none."""
    return {} if torch.version.hip else {"maxnreg": count}


STREAMING: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
PER_ROW: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False, **registers(128)}
PER_BLOCK: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False, **registers(255)}  # it keeps more alive
ATTENTION: dict[str, Any] = {"enable_fp_fusion": True}  # one rounding less
MIN_TILES = 32  # room for the tiles of 262144 logits costs nothing, and every other number would be another variant
WANTED_PROGRAMS = 256  # enough to fill a large device


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least count (at least 1)."""
    return 1 << max(0, count - 1).bit_length()


def splits_of(count: int, num_tiles: int) -> int:
    """The number of programs that share the tiles of each of `count` rows. Few rows alone would leave a device idle."""
    return min(num_tiles, max(1, WANTED_PROGRAMS // max(1, count)))
