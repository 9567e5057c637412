"""Registers and shared memory of every kernel, compiled ahead of time for GPUs that are not here.

    python -m scripts.kernel_table

compiles each variant for each target (many minutes), saves what the machine code uses, and writes the page from it.
Nothing is run on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
BUILDS = ("kernels/paged_aot.py", "kernels/norm_aot.py", "rejection/sampler_aot.py")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
SAVED = ROOT / "benchmarks" / "results" / "kernels.json"
PAGE = ROOT / "docs" / "reference" / "kernels.md"
KEPT = ("variant", "target", "num_warps", "registers", "shared_bytes", "stack_bytes", "local_bytes", "spills")

HEAD = """# Registers of the kernels for a GPU

`python -m scripts.kernel_table` writes this page. It compiles every variant of our Triton kernels ahead of time and
reads the machine code. Nothing is run for it. `benchmarks/results/kernels.json` has each variant.

Compiled at commit {commit} with Triton {triton}. Registers are those of a thread, shared memory is that of a program:
the most of any variant. The last column counts variants that spill registers or use a stack.

| kernels | variants | target | registers | shared memory, bytes | spills |
|---|---|---|---|---|---|
"""


def compiled() -> dict[str, Any]:
    """What each variant uses, by script and target, and with what it was compiled."""
    sys.path.insert(0, str(TESTS / "helpers"))
    import triton
    from aot import reports

    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for script in BUILDS:
            found = reports(TESTS / script, [f"all:{target}" for target in TARGETS], Path(cache))
            rows[name_of(script)] = [{key: each[key] for key in KEPT} for each in found]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {"commit": commit.stdout.strip(), "triton": triton.__version__, "kernels": rows}


def name_of(script: str) -> str:
    """What a script's kernels do: paged, norm, sampler."""
    return Path(script).stem.removesuffix("_aot")


def is_faulty(row: dict[str, Any]) -> bool:
    """Whether a variant keeps anything in memory that belongs in registers."""
    return any(row[key] for key in ("spills", "stack_bytes", "local_bytes"))


def page(saved: dict[str, Any]) -> str:
    """In markdown."""
    return HEAD.format(**saved) + "".join(f"{line}\n" for line in _lines(saved["kernels"]))


def _lines(kernels: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for name, rows in kernels.items():
        for target in TARGETS:
            here = [row for row in rows if row["target"] == target]
            most = [max(row[key] for row in here) for key in ("registers", "shared_bytes")]
            yield f"| {name} | {len(here)} | {target} | {most[0]} | {most[1]} | {sum(map(is_faulty, here))} |"


def saved_text(saved: dict[str, Any]) -> str:
    """JSON with one variant in a line."""
    kernels = {name: _rows_text(rows) for name, rows in saved["kernels"].items()}
    told = ",\n".join(f"{json.dumps(name)}: [\n{rows}\n]" for name, rows in kernels.items())
    return f'{{"commit": "{saved["commit"]}", "triton": "{saved["triton"]}", "kernels": {{\n{told}\n}}}}\n'


def _rows_text(rows: Sequence[dict[str, Any]]) -> str:
    return ",\n".join(map(json.dumps, rows))


if __name__ == "__main__":
    found = compiled()
    SAVED.write_text(saved_text(found), encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
