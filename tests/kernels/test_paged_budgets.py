"""Paged attention compiled ahead of time for GPUs that are not here: nothing spills, and loads are 128 bits wide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AOT = Path(__file__).with_name("paged_aot.py")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
LARGEST_SHARED = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
SLICE = ["decode-bf16-128:sm_90", "verify-bf16-64:sm_80", "join-bf16-128:sm_90", "decode-bf16-64:gfx942"]


def reports(variants, cache):
    return printed(AOT, variants, cache)


def printed(script, arguments, cache):
    """In a process of its own: one that interprets kernels cannot compile them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    strict = ["-W", "error:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"]  # every launch pins it
    done = subprocess.run(
        [sys.executable, *strict, str(script), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def faults(report):
    found = []
    if report["spills"] or report.get("stack_bytes") or report.get("local_bytes"):
        found.append(f"{report['spills']} spills, {report.get('stack_bytes')} bytes of stack")
    if report["shared_bytes"] > LARGEST_SHARED[report["target"]]:
        found.append(f"{report['shared_bytes']} bytes of shared memory")
    if not report["wide_loads"]:
        found.append("no 128-bit load")
    return [f"{report['variant']} on {report['target']}: {fault}" for fault in found]


@pytest.mark.ci
def test_representative_variants_do_not_spill(tmp_path):
    found = reports(SLICE, tmp_path)
    assert len(found) == len(SLICE)
    assert [fault for report in found for fault in faults(report)] == []


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_no_variant_spills(target, tmp_path):
    found = reports([f"all:{target}"], tmp_path)
    assert len(found) > 30
    assert [fault for report in found for fault in faults(report)] == []


def test_the_check_names_what_it_found():
    report = {"variant": "decode", "target": "gfx942", "spills": 2, "shared_bytes": 2**17, "wide_loads": 0}
    assert faults(report) == [
        "decode on gfx942: 2 spills, None bytes of stack",
        "decode on gfx942: 131072 bytes of shared memory",
        "decode on gfx942: no 128-bit load",
    ]


@pytest.mark.ci
def test_batches_of_every_size_ask_for_one_kernel_for_each_tile(tmp_path):
    """16, 32 or 64 rows of queries, keys in ranges or not; numbers of requests, tokens and keys select nothing."""
    script = AOT.with_name("paged_keys.py")
    found = {each["name"]: each["warmed"] for each in printed(script, [], tmp_path)}
    expected = {"attend_pages_kernel": 6, "join_ranges_kernel": 1}
    assert found == {"4096": expected, "131072": expected}
