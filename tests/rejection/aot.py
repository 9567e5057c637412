"""Compile the sampler's kernels for GPUs that are not here, and read the machine code.

    python aot.py VARIANT:TARGET...

prints one JSON object per variant and target; the variant `all` stands for every one. It needs a process of its own,
because a process either interprets kernels or compiles them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from specdec.core.kernels.launch import PER_BLOCK, PER_ROW, STREAMING, TILE
from specdec.core.kernels.row_filter import KEY_BITS, PIVOTS_OF_MANY, PIVOTS_OF_ONE, num_passes
from specdec.core.kernels.row_filter.kernel import filter_rows_kernel
from specdec.core.kernels.row_stats.kernel import draft_stats_kernel, row_stats_kernel
from specdec.core.kernels.verdict import (
    DenseDistribution,
    Distributions,
    Outputs,
    Requests,
    Rows,
    Scratch,
    SparseDistribution,
    Variant,
)
from specdec.core.kernels.verdict.kernel import verdict_kernel

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TILES = 32  # tiles of 8192 that a vocabulary of up to 262144 needs
VEC = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Build:
    """One kernel with everything that decides its code."""

    kernel: JITFunction
    signature: dict[str, Any]
    constants: dict[str, Any]
    aligned: set[tuple[int, ...]]  # arguments that are multiples of 16: pointers, and strides of padded rows
    options: dict[str, Any] = field(default_factory=dict)


def flat(kernel: JITFunction, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> Build:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    wide = [name for name in kernel.arg_names if name.endswith(("_ptr", "_stride")) or name == "vocab_size"]
    aligned = {(kernel.arg_names.index(name),) for name in wide if name not in kernel.do_not_specialize}
    return Build(kernel, signature, constants, aligned, options)


def statistics(dtype: str, skip_last: bool) -> Build:
    types = {"logits_ptr": f"*{dtype}", "row_stride": "i64", "cu_rows_ptr": "*i64", "temperature_ptr": "*fp32"}
    types |= {"maxima_ptr": "*fp32", "sums_ptr": "*fp32", "vocab_size": "i32", "num_places": "i32", "num_tiles": "i32"}
    return flat(row_stats_kernel, types, {"TILE": TILE, "SKIP_LAST": skip_last}, STREAMING)


def draft_statistics(dtype: str) -> Build:
    types = {"logits_ptr": f"*{dtype}", "lengths_ptr": "*i64"}
    types |= {"kinds_ptr": "*u8", "kind": "i32", "maxima_ptr": "*fp32", "sums_ptr": "*fp32"}
    types |= {"vocab_size": "i32", "num_places": "i32", "num_tiles": "i32"}
    return flat(draft_stats_kernel, types, {"TILE": TILE}, STREAMING)


def row_filters(dtype: str, shared: bool) -> Build:
    types = {"logits_ptr": f"*{dtype}", "row_stride": "i64", "cu_rows_ptr": "*i64", "temperature_ptr": "*fp32"}
    types |= {"top_k_ptr": "*i64", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "maxima_ptr": "*fp32"}
    types |= {"sums_ptr": "*fp32", "cutoff_ptr": "*fp32", "state_ptr": "*fp64", "partial_ptr": "*fp64"}
    types |= {"counter_ptr": "*i32", "vocab_size": "i32", "num_places": "i32", "num_tiles": "i32", "turn": "i32"}
    constants = {"TILE": TILE, "TILES": TILES, "SHARED": shared, "SHIFT": 32 - KEY_BITS[DTYPES[dtype]]}
    constants |= {"PIVOTS": PIVOTS_OF_MANY if shared else PIVOTS_OF_ONE}
    constants |= {"LAST_TURN": num_passes(DTYPES[dtype]) - 1}
    return flat(filter_rows_kernel, types, constants, PER_ROW)


def verdicts(dtype: str, distribution: str = "fp32", **variant: Any) -> Build:
    f32, i64 = "*fp32", "*i64"
    dense = DenseDistribution(f"*{distribution}", "i32", "i64", "i32", f32, f32, "i32", "i32")
    arguments = {
        "rows": Rows(f"*{dtype}", "i64", "i32", f32, f32, f32, "i32", "i32", "i32"),
        "distributions": Distributions("*u8", dense, dense, SparseDistribution(i64, f32, "i32", "i32"), i64),
        "scratch": Scratch(f32, "*i32"),
        "outputs": Outputs(i64, i64, f32, f32, i64, "*u8", f32),
    }
    of_step = Requests(i64, "i64", i64, f32, i64, i64, "*fp64", "*fp64", "i32")._asdict()
    aligned = {at for i, group in enumerate(arguments.values()) for at in _aligned(group, (i,))}
    constant = Variant(tile=TILE, tiles=TILES, places=16, **variant)
    options = PER_BLOCK if constant.block else PER_ROW
    return Build(
        verdict_kernel,
        {**arguments, "cu_rows": i64, **of_step, "VARIANT": "constexpr"},
        {"VARIANT": constant},
        aligned,
        options,
    )


def _aligned(group: Any, at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i, (name, kind) in enumerate(zip(group._fields, group, strict=True)):
        if isinstance(kind, tuple):
            yield from _aligned(kind, (*at, i))
        elif kind.startswith("*") or name in ("stride", "step", "size"):
            yield (*at, i)


BUILDS: dict[str, Build] = {
    **{f"stats-{dtype}": statistics(dtype, skip_last=False) for dtype in ("bf16", "fp16", "fp32")},
    "stats-bf16-skip_last": statistics("bf16", skip_last=True),
    **{f"draft_stats-{dtype}": draft_statistics(dtype) for dtype in ("bf16", "fp32")},
    **{f"filters-{dtype}": row_filters(dtype, shared=False) for dtype in ("bf16", "fp16", "fp32")},
    **{f"filters-{dtype}-shared": row_filters(dtype, shared=True) for dtype in ("bf16", "fp32")},
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
    "every_kind-bf16": verdicts("bf16", probs=True, logits=True, sparse=64, mapped=True, filters=True, shared=True),
}  # fmt: skip


def compiled(build: Build, target: GPUTarget) -> CompiledKernel:
    source = ASTSource(build.kernel, build.signature, build.constants, dict.fromkeys(build.aligned, VEC))
    options = {k: v for k, v in build.options.items() if k != "maxnreg" or target.backend == "cuda"}
    return triton.compile(source, target=target, options=options)


def report(name: str, target: str) -> dict[str, Any]:
    """What the machine code of a variant uses."""
    kernel = compiled(BUILDS[name], TARGETS[target])
    facts: dict[str, Any] = {"variant": name, "target": target, "shared_bytes": kernel.metadata.shared}
    facts["tile_per_thread"] = TILE // (32 * kernel.metadata.num_warps)
    return facts | (_amd(kernel.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(kernel.asm["cubin"]))


def _amd(text: str) -> dict[str, Any]:
    found = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
    wide = len(re.findall(r"(?:global|buffer)_load_dwordx4", text))
    return {"registers": found["vgpr_count"], "spills": found["vgpr_spill_count"], "wide_loads": wide}


def _nvidia(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        blocks = basic_blocks(_tool("nvdisasm", "-c", file.name))
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
    spills = sum(code.startswith(("STL", "LDL")) for block in blocks for code in block)
    wide = sum(code.startswith("LDG") and ".128" in code for block in blocks for code in block)
    facts = {"registers": registers, "stack_bytes": stack, "local_bytes": local, "spills": spills}
    return facts | {"wide_loads": wide, "exp2_blocks": [[len(b), _count(b, "MUFU.EX2")] for b in blocks if _hot(b)]}


def _hot(block: list[str]) -> bool:
    """A block that works through a tile: it takes at least sixteen powers per thread."""
    return _count(block, "MUFU.EX2") >= 16


def _count(block: list[str], code: str) -> int:
    return sum(other.startswith(code) for other in block)


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(BIN / name), *arguments], capture_output=True, text=True, check=True).stdout


def basic_blocks(sass: str) -> list[list[str]]:
    """Opcodes between labels and jumps."""
    blocks: list[list[str]] = [[]]
    for line in sass.splitlines():
        if line.startswith(".L_"):
            blocks.append([])
        if found := INSTRUCTION.match(line):
            blocks[-1].append(found[1])
            if found[1].startswith(("BRA", "EXIT", "RET")):
                blocks.append([])
    return blocks


if __name__ == "__main__":
    for variant in sys.argv[1:]:
        wanted, target = variant.split(":")
        for name in BUILDS if wanted == "all" else [wanted]:
            print(json.dumps(report(name, target)), flush=True)
