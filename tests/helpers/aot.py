"""Compile kernels for GPUs that are not here, and read the machine code.

A script that names variants calls `main` with them:

    python SCRIPT VARIANT:TARGET...

prints one JSON object per variant and target; the variant `all` stands for every one. It needs a process of its own,
because a process either interprets kernels or compiles them: `reports` starts it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VEC = [["tt.divisibility", 16]]
HELPERS = Path(__file__).parent
STRICT = ["-W", "error:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"]
"""Every launch says whether products are fused with sums."""


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
    wide = [name for name in types if name.endswith(("_ptr", "_stride")) or name == "vocab_size"]
    aligned = {(kernel.arg_names.index(name),) for name in wide if name not in kernel.do_not_specialize}
    return Build(kernel, signature, constants, aligned, options)


def compiled(build: Build, target: GPUTarget) -> CompiledKernel:
    source = ASTSource(build.kernel, build.signature, build.constants, dict.fromkeys(build.aligned, VEC))
    options = {k: v for k, v in build.options.items() if k != "maxnreg" or target.backend == "cuda"}
    return triton.compile(source, target=target, options=options)


def report(name: str, build: Build, target: str) -> dict[str, Any]:
    """What the machine code of a variant uses."""
    kernel = compiled(build, TARGETS[target])
    facts: dict[str, Any] = {"variant": name, "target": target, "shared_bytes": kernel.metadata.shared}
    facts["num_warps"] = kernel.metadata.num_warps
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


def main(builds: Mapping[str, Build]) -> None:
    """Print the reports that the command line asks for."""
    for variant in sys.argv[1:]:
        wanted, target = variant.split(":")
        for name in builds if wanted == "all" else [wanted]:
            print(json.dumps(report(name, builds[name], target)), flush=True)


def reports(script: Path, arguments: Sequence[str], cache: Path) -> list[dict[str, Any]]:
    """What a script prints, in a process of its own. cache: a folder for what it compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *STRICT, str(script), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def faults(report: Mapping[str, Any], most_shared: int | None = None, *, wide: bool = True) -> list[str]:
    """What a variant does that none should. most_shared: bytes. wide: whether it has to load 128 bits at once."""
    found = []
    if report["spills"] or report.get("local_bytes") or report.get("stack_bytes"):
        found.append(f"{report['spills']} spills, {report.get('stack_bytes')} bytes of stack")
    if most_shared is not None and report["shared_bytes"] > most_shared:
        found.append(f"{report['shared_bytes']} bytes of shared memory")
    if wide and not report["wide_loads"]:
        found.append("no 128-bit load")
    return named(report, found)


def named(report: Mapping[str, Any], found: Sequence[str]) -> list[str]:
    """Each with the variant and the target that it was found in."""
    return [f"{report['variant']} on {report['target']}: {fault}" for fault in found]
