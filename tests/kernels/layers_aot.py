"""Operations of layers, compiled ahead of time: see `tests/helpers/aot.py`.

PYTHONPATH=src:tests/helpers python tests/kernels/layers_aot.py VARIANT:TARGET...
"""

from __future__ import annotations

from aot import flat, main

from specdec.core.kernels.cuda.launch import next_power_of_two
from specdec.core.kernels.cuda.layers.kernel import (
    OPTIONS,
    WIDTH,
    rms_norm_kernel,
    rotate_kernel,
    silu_mul_kernel,
    warps_of,
)


def norm(dtype: str, size: int, heads: int = 1, gain: str | None = None, *, added: bool = False):
    pointers = ("rows_ptr", "added_ptr", "total_ptr", "output_ptr")
    types = dict.fromkeys(pointers, f"*{dtype}") | {"gain_ptr": f"*{gain or dtype}", "eps": "fp32"}
    types |= dict.fromkeys(("token_stride", "head_stride"), "i32")
    padded = next_power_of_two(size)
    constants = {"HEADS": heads, "SIZE": size, "PADDED_SIZE": padded, "ADDED": added}
    return flat(rms_norm_kernel, types, constants, {"num_warps": warps_of(padded), **OPTIONS})


def gates(dtype: str, size: int):
    types = dict.fromkeys(("gate_ptr", "up_ptr", "output_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("gate_stride", "up_stride"), "i32")
    return flat(silu_mul_kernel, types, {"SIZE": size, "WIDTH": WIDTH}, {"num_warps": 4, **OPTIONS})


def rotation(dtype: str, dim: int, *, stored: bool = True):
    names = rotate_kernel.arg_names
    types = {name: f"*{dtype}" for name in names if name.endswith("_ptr")} | {"slots_ptr": "*i64"}
    types |= {name: "i32" for name in names if name.endswith("_stride")}
    constants = {"HEADS": 32, "KV_HEADS": 8, "DIM": dim, "VALUE_DIM": dim, "STORED": stored}
    constants |= {"PADDED_HALF": next_power_of_two(dim // 2), "PADDED_VALUE_DIM": next_power_of_two(dim)}
    return flat(rotate_kernel, types, constants, {"num_warps": 1, **OPTIONS})


BUILDS = {
    **{f"norm-{t}-{size}": norm(t, size) for t in ("bf16", "fp16", "fp32") for size in (2048, 4096, 5120, 8192, 16384)},
    **{f"add_norm-bf16-{size}": norm("bf16", size, added=True) for size in (2048, 4096, 5120, 8192, 16384)},
    "add_norm-fp32-4096": norm("fp32", 4096, added=True),
    "add_norm-bf16-2560-wide": norm("bf16", 2560, gain="fp32", added=True),
    **{f"head_norm-bf16-{dim}": norm("bf16", dim, heads=32) for dim in (64, 80, 128, 256)},
    **{f"gates-{t}-14336": gates(t, 14336) for t in ("bf16", "fp16", "fp32")},
    **{f"rotate-{t}-{dim}": rotation(t, dim) for t in ("bf16", "fp16", "fp32") for dim in (64, 80, 128, 256)},
    "rotate-bf16-128-alone": rotation("bf16", 128, stored=False),
}


if __name__ == "__main__":
    main(BUILDS)
