"""Norms, compiled ahead of time: see `tests/helpers/aot.py`.

PYTHONPATH=src:tests/helpers python tests/kernels/norm_aot.py VARIANT:TARGET...
"""

from __future__ import annotations

from aot import flat, main

from specdec.core.kernels.cuda.launch import next_power_of_two
from specdec.core.kernels.cuda.rms_norm import OPTIONS, rms_norm_kernel, warps_of


def norm(dtype: str, size: int, heads: int = 1, gain: str | None = None):
    types = {"rows_ptr": f"*{dtype}", "output_ptr": f"*{dtype}", "gain_ptr": f"*{gain or dtype}", "eps": "fp32"}
    types |= dict.fromkeys(("token_stride", "head_stride"), "i32")
    padded = next_power_of_two(size)
    constants = {"HEADS": heads, "SIZE": size, "PADDED_SIZE": padded}
    return flat(rms_norm_kernel, types, constants, {"num_warps": warps_of(padded), **OPTIONS})


BUILDS = {
    **{f"norm-{t}-{size}": norm(t, size) for t in ("bf16", "fp16", "fp32") for size in (2048, 4096, 5120, 8192, 16384)},
    "norm-bf16-2560-wide": norm("bf16", 2560, gain="fp32"),
    **{f"head_norm-bf16-{dim}": norm("bf16", dim, heads=32) for dim in (64, 80, 128, 256)},
}


if __name__ == "__main__":
    main(BUILDS)
