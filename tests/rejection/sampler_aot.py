"""The sampler's kernels, compiled ahead of time: see `tests/helpers/aot.py`.

PYTHONPATH=src:tests/helpers python tests/rejection/sampler_aot.py VARIANT:TARGET...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aot import DTYPES, Build, main
from triton.runtime.jit import JITFunction

from specdec.core.kernels.cuda.launch import PER_BLOCK, PER_ROW, STREAMING, TILE
from specdec.core.kernels.cuda.row_filter import KEY_BITS, filter_rows_kernel
from specdec.core.kernels.cuda.row_stats import draft_stats_kernel, row_stats_kernel
from specdec.core.kernels.cuda.tree_verdict.kernel import tree_verdict_kernel
from specdec.core.kernels.cuda.verdict import (
    DenseLogits,
    DenseProbs,
    Distributions,
    Outputs,
    Requests,
    Rows,
    Scratch,
    SparseDistribution,
    Variant,
)
from specdec.core.kernels.cuda.verdict.kernel import verdict_kernel

WIDE = "stride", "size", "vocab_size"
TILES = 32  # tiles of 8192 that a vocabulary of up to 262144 needs


def statistics(dtype: str, skip_last: bool) -> Build:
    rows = Rows(f"*{dtype}", "i64", "*fp32", "*fp32", None, "i32", "i32")
    arguments = {"rows": rows, "cu_rows_ptr": "*i64", "temperature_ptr": "*fp32", "num_places": "i32"}
    return built(row_stats_kernel, arguments, {"TILE": TILE, "SKIP_LAST": skip_last}, STREAMING, WIDE)


def draft_statistics(dtype: str) -> Build:
    drafts = DenseLogits(f"*{dtype}", "i32", "*fp32", "*fp32", "i32")
    arguments = {"drafts": drafts, "lengths_ptr": "*i64", "kinds_ptr": "*u8", "num_places": "i32"}
    return built(draft_stats_kernel, arguments, {"TILE": TILE}, STREAMING)


def row_filters(dtype: str) -> Build:
    arguments = {"rows": Rows(f"*{dtype}", "i64", "*fp32", "*fp32", "*fp32", "i32", "i32"), "cu_rows_ptr": "*i64"}
    arguments |= {"temperature_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
    constants = {"TILE": TILE, "TILES": TILES, "SHIFT": 32 - KEY_BITS[DTYPES[dtype]]}
    return built(filter_rows_kernel, arguments | {"num_places": "i32"}, constants, PER_ROW, WIDE)


def verdicts(
    dtype: str,
    distribution: str = "fp32",
    *,
    trees: bool = False,
    probs: bool = False,
    logits: bool = False,
    sparse: int = 0,
    mapped: bool = False,
    filters: bool = False,
    uniforms: bool = False,
    **variant: Any,
) -> Build:
    """One variant. What it lacks is None, which is a constant of the kernel."""
    f32, i64, given = "*fp32", "*i64", "*fp64" if uniforms else None
    drawn = bool(probs or logits or sparse)
    arguments: dict[str, Any] = {
        "rows": Rows(f"*{dtype}", "i64", f32, f32, f32 if filters else None, "i32", "i32"),
        "distributions": Distributions(
            "*u8" if drawn else None,
            DenseProbs(f"*{distribution}", "i32") if probs else None,
            DenseLogits(f"*{distribution}", "i32", f32, f32, "i32") if logits else None,
            SparseDistribution(i64, f32, "i32") if sparse else None,
            i64 if mapped else None,
        ),
        "scratch": Scratch(f32, "*i32"),
        "outputs": Outputs(i64, i64, i64, i64 if trees else None),
    }
    parents, replacement = (i64, "*u8" if drawn else None) if trees else (None, None)
    of_step = Requests(i64, i64, "i64", i64, f32, i64, i64, given, given, "i32", parents, replacement)
    arguments |= of_step._asdict()
    places = 64 if trees else 16
    constant = Variant(tile=TILE, tiles=TILES, places=places, sparse=sparse, **variant)
    options = PER_BLOCK if constant.block or (trees and drawn) else PER_ROW
    return built(tree_verdict_kernel if trees else verdict_kernel, arguments, {"VARIANT": constant}, options)


def built(
    kernel: JITFunction,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    options: dict[str, Any],
    wide: tuple[str, ...] = ("stride", "size"),
) -> Build:
    """A variant whose arguments may be tuples: their members are specialised, and no others. `wide`: which numbers in
    these are multiples of 16.
    """
    missing = {at: None for i, each in enumerate(arguments.values()) for at in _missing(each, (i,))}
    groups = ((each, (i,)) for i, each in enumerate(arguments.values()) if isinstance(each, tuple))
    return Build(
        kernel,
        {name: _signature(each) for name, each in arguments.items()} | dict.fromkeys(constants, "constexpr"),
        constants | missing,
        {at for group in groups for at in _aligned(*group, wide)},
        options,
    )


def _signature(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return type(argument)(*map(_signature, argument))
    return argument or "constexpr"


def _missing(argument: Any, at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if argument is None:
        yield at
    elif isinstance(argument, tuple):
        for i, each in enumerate(argument):
            yield from _missing(each, (*at, i))


def _aligned(group: Any, at: tuple[int, ...], wide: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    for i, (name, kind) in enumerate(zip(group._fields, group, strict=True)):
        if isinstance(kind, tuple):
            yield from _aligned(kind, (*at, i), wide)
        elif kind is not None and (kind.startswith("*") or name in wide):
            yield (*at, i)


BUILDS: dict[str, Build] = {
    **{f"stats-{dtype}": statistics(dtype, skip_last=False) for dtype in ("bf16", "fp16", "fp32")},
    "stats-bf16-skip_last": statistics("bf16", skip_last=True),
    **{f"draft_stats-{dtype}": draft_statistics(dtype) for dtype in ("bf16", "fp32")},
    **{f"filters-{dtype}": row_filters(dtype) for dtype in ("bf16", "fp16", "fp32")},
    **{f"one_hot-{dtype}": verdicts(dtype, skip_last=True, shared=True) for dtype in ("bf16", "fp16", "fp32")},
    "one_hot-bf16-alone": verdicts("bf16", skip_last=True),
    "one_hot-bf16-filters": verdicts("bf16", filters=True),
    "one_hot-bf16-uniforms": verdicts("bf16", uniforms=True, skip_last=True),
    **{f"probs-{dtype}": verdicts(dtype, probs=True, skip_last=True, shared=True) for dtype in ("bf16", "fp32")},
    "probs-bf16-mapped": verdicts("bf16", probs=True, mapped=True, skip_last=True, shared=True),
    "probs-bf16-filters": verdicts("bf16", probs=True, filters=True, shared=True),
    **{f"logits-{d}": verdicts(d, d, logits=True, skip_last=True, shared=True) for d in ("bf16", "fp32")},
    "logits-bf16-mapped": verdicts("bf16", "bf16", logits=True, mapped=True, skip_last=True, shared=True),
    "sparse256-bf16": verdicts("bf16", sparse=256, skip_last=True, shared=True),
    "sparse256-bf16-filters": verdicts("bf16", sparse=256, filters=True),
    "sparse256-fp32": verdicts("fp32", sparse=256, skip_last=True, shared=True),
    "block_sparse256-bf16": verdicts("bf16", sparse=256, block=True, skip_last=True),
    "sparse-bf16": verdicts("bf16", sparse=64, skip_last=True, shared=True),
    "sparse-bf16-filters": verdicts("bf16", sparse=64, filters=True),
    "block_probs-bf16": verdicts("bf16", probs=True, block=True, skip_last=True),
    "block_probs-bf16-shared": verdicts("bf16", probs=True, block=True, skip_last=True, shared=True),
    "block_logits-bf16-mapped": verdicts("bf16", "bf16", logits=True, mapped=True, block=True, skip_last=True),
    "block_sparse-bf16": verdicts("bf16", sparse=64, block=True, skip_last=True),
    **{f"trees-{dtype}": verdicts(dtype, trees=True) for dtype in ("bf16", "fp16", "fp32")},
    "trees-bf16-filters": verdicts("bf16", trees=True, filters=True),
    "trees-bf16-uniforms": verdicts("bf16", trees=True, uniforms=True),
    **{f"trees_probs-{dtype}": verdicts(dtype, trees=True, probs=True) for dtype in ("bf16", "fp32")},
    "trees_logits-bf16-mapped": verdicts("bf16", "bf16", trees=True, logits=True, mapped=True),
    **{f"trees_sparse-{dtype}": verdicts(dtype, trees=True, sparse=64) for dtype in ("bf16", "fp32")},
    "trees_sparse-bf16-filters": verdicts("bf16", trees=True, sparse=64, filters=True),
    "trees_sparse-bf16-block": verdicts("bf16", trees=True, sparse=64, block=True),
    "trees_probs-bf16-block": verdicts("bf16", trees=True, probs=True, block=True),
    "trees_dense-bf16-filters": verdicts("bf16", trees=True, probs=True, logits=True, filters=True, block=True),
    "every_kind-bf16": verdicts("bf16", probs=True, logits=True, sparse=64, mapped=True, filters=True, shared=True),
}  # fmt: skip


if __name__ == "__main__":
    main(BUILDS)
