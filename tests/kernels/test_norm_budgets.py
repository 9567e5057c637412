"""Norms compiled ahead of time for GPUs that are not here: no stack, no spills, loads that are wide."""

from __future__ import annotations

from pathlib import Path

import pytest
from aot import faults, reports

SCRIPT = Path(__file__).with_name("norm_aot.py")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
SLICE = ["norm-bf16-4096:sm_90", "head_norm-bf16-128:sm_89", "norm-fp32-16384:sm_100", "norm-bf16-2560-wide:sm_80"]
MOST_SHARED = 1024  # bytes: a sum over warps


def faults_of(found):
    return [each for report in found for each in faults(report, MOST_SHARED, wide=report["variant"].startswith("norm"))]


@pytest.mark.slow
def test_representative_variants_use_registers_only(tmp_path):
    found = reports(SCRIPT, SLICE, tmp_path)
    assert len(found) == len(SLICE)
    assert faults_of(found) == []


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_no_variant_spills(target, tmp_path):
    found = reports(SCRIPT, [f"all:{target}"], tmp_path)
    assert len(found) == 20
    assert faults_of(found) == []


def test_the_check_names_what_it_found():
    report = {"variant": "norm", "target": "sm_90", "spills": 2, "stack_bytes": 8, "local_bytes": 0}
    assert faults_of([report | {"shared_bytes": 4096, "wide_loads": 0}]) == [
        "norm on sm_90: 2 spills, 8 bytes of stack",
        "norm on sm_90: 4096 bytes of shared memory",
        "norm on sm_90: no 128-bit load",
    ]
