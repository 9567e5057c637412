"""Operations of layers compiled ahead of time for GPUs that are not here: no stack, no spills, loads that are wide."""

from __future__ import annotations

from pathlib import Path

import pytest
from aot import faults, reports

SCRIPT = Path(__file__).with_name("layers_aot.py")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")
SLICE = ["add_norm-bf16-4096:sm_90", "head_norm-bf16-128:sm_89", "gates-bf16-14336:sm_100", "rotate-bf16-128:sm_80"]
MOST_SHARED = 1024  # bytes: a sum over warps
WIDE = ("norm", "add_norm", "gates")


def faults_of(found):
    return [each for report in found for each in faults(report, MOST_SHARED, wide=report["variant"].startswith(WIDE))]


@pytest.mark.slow
def test_representative_variants_use_registers_only(tmp_path):
    found = reports(SCRIPT, SLICE, tmp_path)
    assert len(found) == len(SLICE)
    assert faults_of(found) == []


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_no_variant_spills(target, tmp_path):
    found = reports(SCRIPT, [f"all:{target}"], tmp_path)
    assert len(found) > 35
    assert faults_of(found) == []


def test_the_check_names_what_it_found():
    report = {"variant": "gates", "target": "sm_90", "spills": 2, "stack_bytes": 8, "local_bytes": 0}
    assert faults_of([report | {"shared_bytes": 4096, "wide_loads": 0}]) == [
        "gates on sm_90: 2 spills, 8 bytes of stack",
        "gates on sm_90: 4096 bytes of shared memory",
        "gates on sm_90: no 128-bit load",
    ]
