"""The record of what kernels use has every target, next to nothing is spilt, and the page says what it says."""

from __future__ import annotations

import json

from scripts.kernel_table import PAGE, RECORD, SCRIPTS, TARGETS, page, summary

RECORDED = json.loads(RECORD.read_text())
SPILT = {"attention": "prompt-fp16-256 on gfx942"}


def test_every_target_has_every_variant_and_one_spills():
    assert tuple(RECORDED) == tuple(SCRIPTS)
    for group, made in RECORDED.items():
        assert tuple(made["targets"]) == TARGETS
        assert len({frozenset(found) for found in made["targets"].values()}) == 1
        spilt = f"These spill or have a stack: {SPILT[group]}." if group in SPILT else "None spills"
        assert spilt in summary(made)


def test_the_page_says_what_the_record_says():
    assert PAGE.read_text() == page(RECORDED), "python -m scripts.kernel_table"


def facts(registers, shared, spills=0):
    return {"num_warps": 4, "registers": registers, "shared_bytes": shared, "spills": spills, "stack_bytes": 0}


def test_a_cell_has_the_most_of_its_variants_and_a_spill_is_named():
    found = {
        "norm-bf16-2048": facts(40, 512),
        "norm-fp32-2048": facts(38, 1536, spills=2),
        "head_norm-bf16": facts(9, 0),
    }
    text = page({"norms": {"commit": "0123456789", "triton": "3.9.0", "targets": {"sm_90": found}}})
    assert "3 compilations of 01234567 by triton 3.9.0. These spill or have a stack: norm-fp32-2048 on sm_90." in text
    assert "| kernel | sm_90 |\n|---|---|\n| `norm` | 40, 1.5 KiB |\n| `head_norm` | 9, 0 B |\n" in text
