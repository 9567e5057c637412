"""What the kernels cost on GPUs that are not here: compiled ahead of time, read from the machine code.

All 47 variants on all six targets are marked. A process that interprets kernels cannot compile them, so a second one
does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aot import faults, named, reports
from benchmarks.verification_cost import Step, minimum_bytes, moved_bytes, num_launches

from specdec.core.kernels.cuda.launch import TILE

SCRIPT = Path(__file__).with_name("sampler_aot.py")
STATS_BUDGET, RESIDUAL_BUDGET = 8, 16  # SASS instructions per element on sm_90
DRAW_BUDGET = 24  # a tree reads no row as a whole: its tiles are those from which tokens are drawn
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


def broken_budgets(report: dict[str, Any]) -> list[str]:
    """What a variant uses above its budget, with the number."""
    if report["target"] != "sm_90":
        return faults(report)
    width, broken = TILE // (32 * report["num_warps"]), []
    budget = STATS_BUDGET if "stats" in report["variant"] else RESIDUAL_BUDGET
    if report["variant"].startswith("trees"):
        budget = DRAW_BUDGET
    for length, powers in report["exp2_blocks"]:
        if length / min(width, powers) > budget:
            broken.append(f"{length / min(width, powers):.1f} instructions per element, budget {budget}")
    return [*faults(report), *named(report, broken)]


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_keeps_its_budgets(target: str, tmp_path: Path) -> None:
    found = reports(SCRIPT, [f"all:{target}"], tmp_path)
    assert len(found) == 47
    assert [line for report in found for line in broken_budgets(report)] == []


def test_budget_check_names_what_it_found() -> None:
    report = {"variant": "stats-bf16", "target": "sm_90", "spills": 3, "wide_loads": 0, "num_warps": 4}
    report["exp2_blocks"] = [[640, 64]]
    assert broken_budgets(report) == [
        "stats-bf16 on sm_90: 3 spills, None bytes of stack",
        "stats-bf16 on sm_90: no 128-bit load",
        "stats-bf16 on sm_90: 10.0 instructions per element, budget 8",
    ]


STEPS = {
    "one_hot": Step(num_requests=64, num_drafts=5, vocab_size=151_936, bytes_per_logit=2),
    "dense": Step(64, 5, 151_936, 2, bytes_per_distribution=4),
    "draft_logits": Step(64, 5, 151_936, 2, bytes_per_distribution=2, distribution_statistics=True),
    "sparse": Step(64, 5, 151_936, 2, sparse_ids=64),
}


@pytest.mark.parametrize("name", STEPS)
def test_bytes_moved_stay_near_the_least_possible(name: str) -> None:
    """5 % above: tile statistics, and the tiles from which tokens are drawn."""
    step = STEPS[name]
    assert moved_bytes(step, acceptance=0.7) <= 1.05 * minimum_bytes(step, acceptance=0.7)


def test_number_of_launches() -> None:
    assert num_launches(STEPS["one_hot"]) == 2
    assert num_launches(STEPS["draft_logits"]) == 3
    assert num_launches(Step(64, 0, 151_936, 2)) == 1
    assert num_launches(Step(64, 5, 151_936, 2, filters=True)) == 3
