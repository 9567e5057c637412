"""Write the page "what the kernels use" of the docs: every variant, compiled ahead of time for GPUs that are not here.

python -m scripts.kernel_table             render benchmarks/results/kernels.json again
python -m scripts.kernel_table GROUP...    compile these first, for every target: sampler (15 minutes), attention, norms

The variants are those of the tests of budgets: `tests/**/*_aot.py`.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "kernels.json"
PAGE = ROOT / "docs" / "reference" / "kernels.md"
SCRIPTS = {
    "sampler": "tests/rejection/sampler_aot.py",
    "attention": "tests/kernels/paged_aot.py",
    "norms": "tests/kernels/norm_aot.py",
}
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
FACTS = ("num_warps", "registers", "shared_bytes", "spills", "stack_bytes")
HEAD = """\
# What the kernels use

Every variant of the Triton kernels, compiled ahead of time for GPUs that were not at hand. A cell has the registers of
one thread and the shared memory of one block: the most of its variants. For gfx942 they are vector registers.
"""
TAIL = """
`scripts/kernel_table.py` writes this page from `benchmarks/results/kernels.json`, which has each variant. The tests of
budgets compile the same variants: `tests/rejection/test_budgets.py`, `tests/kernels/test_paged_budgets.py` and
`tests/kernels/test_norm_budgets.py`.
"""


def compiled(script: str, target: str) -> dict[str, Any]:
    """What each variant of a script uses on a target, by its name."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from aot import reports  # of the tests, which import it by this name too

    with tempfile.TemporaryDirectory() as cache:
        found = reports(ROOT / script, [f"all:{target}"], Path(cache))
    return {each["variant"]: {name: each.get(name, 0) for name in FACTS} for each in found}


def taken(group: str) -> dict[str, Any]:
    """A group for every target, and what it was compiled from and with."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = {"commit": commit.strip(), "triton": importlib.metadata.version("triton")}
    return made | {"targets": {target: compiled(SCRIPTS[group], target) for target in TARGETS}}


def page(record: Mapping[str, Any]) -> str:
    """A table for each group of kernels: a row for each kernel, a column for each target."""
    return HEAD + "".join(section(group, made) for group, made in record.items()) + TAIL


def section(group: str, made: Mapping[str, Any]) -> str:
    """A group's outcome and its table. A variant is named after its kernel: `decode-bf16-128`."""
    targets = made["targets"]
    kernels = {name.split("-")[0]: None for found in targets.values() for name in found}
    head = f"| kernel | {' | '.join(targets)} |\n|---{'|---' * len(targets)}|\n"
    return f"\n## {group.capitalize()}\n\n{summary(made)}\n\n{head}" + "".join(
        f"| `{kernel}` | {' | '.join(cell(of_kernel(kernel, found)) for found in targets.values())} |\n"
        for kernel in kernels
    )


def summary(made: Mapping[str, Any]) -> str:
    """How many variants were compiled, from what and with what, and which of them spill or have a stack."""
    every = [
        (f"{name} on {target}", facts) for target, found in made["targets"].items() for name, facts in found.items()
    ]
    wrong = [name for name, facts in every if facts["spills"] or facts["stack_bytes"]]
    outcome = f"These spill or have a stack: {', '.join(wrong)}." if wrong else "None spills, and none has a stack."
    return f"{len(every)} compilations of {made['commit'][:8]} by triton {made['triton']}. {outcome}"


def of_kernel(kernel: str, found: Mapping[str, Mapping[str, int]]) -> list[Mapping[str, int]]:
    """The facts of a kernel's variants."""
    return [facts for name, facts in found.items() if name.split("-")[0] == kernel]


def cell(found: Sequence[Mapping[str, int]]) -> str:
    """The most that one of these variants uses."""
    registers, shared = (max(facts[name] for facts in found) for name in ("registers", "shared_bytes"))
    return f"{registers}, {f'{shared / 1024:.3g} KiB' if shared >= 1024 else f'{shared} B'}"


def main(*groups: str) -> None:
    """Compile groups if any are named, and write the page."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if groups:
        made = record | {group: taken(group) for group in groups}
        record = {group: made[group] for group in SCRIPTS}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
