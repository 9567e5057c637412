"""The comparison with other engines: it runs, counts every token, and verifies its goals by what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import performance_page
from benchmarks.peers import goals, report
from benchmarks.peers.contender import Contender
from benchmarks.peers.successors import CIRCLE, Spoiled, successor

ROOT = Path(__file__).parents[2]
PLAIN = Contender("ours", "plain", "float32")
INT8 = PLAIN._replace(precision="int8")
THEIRS = PLAIN._replace(engine="transformers")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """One round of one short prompt, ours and transformers, plain and n-gram, for one prompt and for two."""
    path = tmp_path_factory.mktemp("peers") / "result.json"
    arguments = "--engines ours transformers --methods plain ngram --precisions float32 --batch 1 2 --rounds 2"
    command = [sys.executable, "-m", "benchmarks.peers", *arguments.split(), "--num-prompts", "1", "--output-len", "8"]
    command += ["--save", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.mark.full  # three processes that load torch
def test_every_contender_generates_every_token_and_the_same_text(result):
    rows = {(row["engine"], row["method"], row["batch"]): row for row in result["runs"]}
    batch_1 = {(engine, method, 1) for engine in ("ours", "transformers") for method in ("plain", "ngram")}
    assert rows.keys() == batch_1 | {("ours", "plain", 2), ("ours", "ngram", 2), ("transformers", "plain", 2)}
    for row in result["runs"]:
        assert row["tokens"] == 8 * row["batch"]
        assert len(row["tokens_per_second"]) == len(row["seconds"]) == 2
        assert row["same_text"] == 1


@pytest.mark.full  # three processes that load torch
def test_an_engine_that_refuses_is_a_row_with_its_reason(result):
    (row,) = result["refused"]
    assert (row["engine"], row["method"], row["batch"]) == ("transformers", "ngram", 2)
    assert "batch_size = 1" in row["reason"]
    table = report.speeds(result).markdown()
    (line,) = [line for line in table.splitlines() if line.startswith("| transformers | ngram")]
    assert "batch_size = 1" in line


def test_a_ratio_is_taken_within_each_round_and_the_median_decides():
    found = goals.verified({PLAIN: [2.0, 30.0, 12.0], THEIRS: [1.0, 20.0, 10.0]}, batch=1)
    parity, fastest = found[:2]
    assert (parity["median"], parity["range"], parity["met"]) == (1.5, [1.2, 2.0], True)
    assert (fastest["goal"], fastest["median"], fastest["met"]) == (2.2, 1.5, False)
    assert "missed by 32%" in report.goals({"target": {"name": "x"}, "goals": [fastest]}).markdown()


def test_a_goal_of_the_fastest_takes_the_precision_with_the_highest_median():
    speeds = {PLAIN: [10.0] * 3, INT8: [30.0, 5.0, 31.0], THEIRS: [10.0] * 3}
    parity, fastest = goals.verified(speeds, batch=1)[:2]
    assert (parity["ours"], fastest["ours"]) == (str(PLAIN), str(INT8))
    assert fastest["median"] == 3.0


def test_goals_of_contenders_that_did_not_run_are_left_out():
    assert goals.verified({PLAIN: [1.0]}, batch=1) == []


def test_a_synthetic_draft_follows_the_circle_and_is_wrong_as_often_as_stated():
    assert successor(CIRCLE - 1) == 0
    assert successor(5 * CIRCLE + 3) == 5 * CIRCLE + 4
    drafts = Spoiled(0.8).after(0, 10_000)
    right = sum(token == successor(index % CIRCLE) for index, token in enumerate(drafts))
    assert 7850 < right < 8150  # 0.8 within 3.75 standard deviations, of a fixed seed
    assert Spoiled(1.0).after(7, 3) == [8, 9, 10]


def test_the_page_shows_the_recorded_results():
    page = performance_page.PAGE.read_text(encoding="utf-8")
    assert performance_page.written(page) == page, "run python -m benchmarks.performance_page"
