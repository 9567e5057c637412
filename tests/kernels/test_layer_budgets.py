"""Operations of layers compiled ahead of time for GPUs that are not here: no stack, no spills, loads that are wide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AOT = Path(__file__).with_name("layers_aot.py")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")
SLICE = ["add_norm-bf16-4096:sm_90", "head_norm-bf16-128:sm_89", "gates-bf16-14336:sm_100", "rotate-bf16-128:sm_80"]
MOST_SHARED = 1024  # bytes: a sum over warps


def reports(variants, cache):
    """In a process of its own: one that interprets kernels cannot compile them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(AOT), *variants], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def faults(report):
    found = []
    if report["spills"] or report["stack_bytes"] or report["local_bytes"]:
        found.append(f"{report['spills']} spills, {report['stack_bytes']} bytes of stack")
    if report["shared_bytes"] > MOST_SHARED:
        found.append(f"{report['shared_bytes']} bytes of shared memory")
    if report["variant"].startswith(("norm", "add_norm", "gates")) and not report["wide_loads"]:
        found.append("no 128-bit load")
    return [f"{report['variant']} on {report['target']}: {fault}" for fault in found]


@pytest.mark.ci
def test_representative_variants_use_registers_only(tmp_path):
    found = reports(SLICE, tmp_path)
    assert len(found) == len(SLICE)
    assert [fault for report in found for fault in faults(report)] == []


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_no_variant_spills(target, tmp_path):
    found = reports([f"all:{target}"], tmp_path)
    assert len(found) > 35
    assert [fault for report in found for fault in faults(report)] == []


def test_the_check_names_what_it_found():
    report = {"variant": "gates", "target": "sm_90", "spills": 2, "stack_bytes": 8, "local_bytes": 0}
    assert faults(report | {"shared_bytes": 4096, "wide_loads": 0}) == [
        "gates on sm_90: 2 spills, 8 bytes of stack",
        "gates on sm_90: 4096 bytes of shared memory",
        "gates on sm_90: no 128-bit load",
    ]
