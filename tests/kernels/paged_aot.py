"""Paged attention, compiled ahead of time: see `tests/helpers/aot.py`.

PYTHONPATH=src:tests/helpers python tests/kernels/paged_aot.py VARIANT:TARGET...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from aot import DTYPES, flat, main

from specdec.core.kernels.attention_spec import Mode
from specdec.core.kernels.cuda.launch import ATTENTION
from specdec.core.kernels.cuda.paged_attention.kernel import (
    PARTS,
    SEGMENT,
    attend_pages_kernel,
    join_parts_kernel,
    tile_of,
)

GROUP = 4


LAYER = ("window", "chunk", "softcap", "sinks_ptr")


def attention(
    dtype: str, dim: int, num_rows: int, *, divided: bool, mode: str = "causal", having: Iterable[str] = (), tree=False
):
    """One variant. `having`: what its kind of layer has, of `LAYER`."""
    out = "fp32" if divided else dtype
    types = {"query_ptr": f"*{dtype}", "keys_ptr": f"*{dtype}", "values_ptr": f"*{dtype}", "output_ptr": f"*{out}"}
    types |= dict.fromkeys(("keys_stride", "values_stride"), "i32")
    types |= dict.fromkeys(("maxima_ptr", "sums_ptr"), "*fp32")
    types |= dict.fromkeys(("table_ptr", "num_keys_ptr", "cu_queries_ptr"), "*i32")
    types |= dict.fromkeys(("table_width", "num_kv_heads", "most_divided", "num_programs"), "i32")
    nodes = {"num_nodes_ptr": "*i32", "ancestors_ptr": "*i64", "depths_ptr": "*i32", "tree_width": "i32"}
    limits = {"window": "i32", "chunk": "i32", "softcap": "fp32", "sinks_ptr": f"*{dtype}"}
    types |= {"scale": "fp32"} | (nodes if tree else {}) | {name: limits[name] for name in having}
    tile = tile_of(num_rows, dim, DTYPES[dtype], tree=tree)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in tile} | ATTENTION
    constants = tile | {"GROUP": GROUP, "DIM": dim, "VALUE_DIM": dim, "BLOCK_SIZE": 16, "MODE": mode}
    constants |= {"PARTS": PARTS if divided else 1, "SEGMENT": SEGMENT}
    constants |= dict.fromkeys({*limits, *nodes} - set(types))
    return flat(attend_pages_kernel, types, constants, options)


def joining(dtype: str, dim: int, *, sinking: bool = False):
    types = {"totals_ptr": "*fp32", "maxima_ptr": "*fp32", "sums_ptr": "*fp32", "cu_queries_ptr": "*i32"}
    types |= {"output_ptr": f"*{dtype}", "num_heads": "i32", "most_divided": "i32"}
    constants: dict[str, object] = {"VALUE_DIM": dim, "PARTS": PARTS}
    if sinking:
        types["sinks_ptr"] = f"*{dtype}"
    else:
        constants["sinks_ptr"] = None
    return flat(join_parts_kernel, types, constants, {"num_warps": 4} | ATTENTION)


DECODE, VERIFY, PROMPT = 4, 24, 8192
TREE = 4 * 65
GPT_OSS = {"dim": 64, "having": ("window", "sinks_ptr")}
BUILDS = {
    **{f"decode-{t}-{dim}": attention(t, dim, DECODE, divided=True) for t in DTYPES for dim in (32, 64, 128, 256)},
    **{f"verify-bf16-{dim}": attention("bf16", dim, VERIFY, divided=True) for dim in (64, 80, 128, 256)},
    **{f"prompt-{t}-{dim}": attention(t, dim, PROMPT, divided=False) for t in DTYPES for dim in (64, 128, 256)},
    "prompt-bf16-128-window": attention("bf16", 128, PROMPT, divided=False, having=LAYER),
    **{
        f"verify-bf16-128-{mode}": attention("bf16", 128, VERIFY, divided=True, mode=mode, having=LAYER)
        for mode in get_args(Mode)
    },
    **{f"decode-{t}-64-sinks": attention(t, num_rows=DECODE, divided=True, **GPT_OSS) for t in DTYPES},
    **{f"prompt-{t}-64-sinks": attention(t, num_rows=PROMPT, divided=False, **GPT_OSS) for t in DTYPES},
    **{
        f"prompt-bf16-{dim}-sinks": attention("bf16", dim, PROMPT, divided=False, having=["sinks_ptr"])
        for dim in (128, 256)
    },
    **{f"tree-{t}-{dim}": attention(t, dim, TREE, divided=True, tree=True) for t in DTYPES for dim in (64, 128, 256)},
    **{f"small_tree-bf16-{dim}": attention("bf16", dim, 16, divided=True, tree=True) for dim in (64, 128)},
    "tree-bf16-128-window": attention("bf16", 128, TREE, divided=True, tree=True, having=LAYER),
    "prompt_beside_tree-bf16-128": attention("bf16", 128, PROMPT, divided=False, tree=True),
    **{f"join-{t}-{dim}": joining(t, dim) for t in ("bf16", "fp32") for dim in (64, 128, 256)},
    **{f"join-{t}-64-sinks": joining(t, 64, sinking=True) for t in DTYPES},
}


if __name__ == "__main__":
    main(BUILDS)
