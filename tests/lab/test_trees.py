"""Trees in results: their size and use in figures, tables and pages, and what `why` makes of their steps."""

from __future__ import annotations

import io

import pytest
from recordings import shared
from rich.console import Console

from specdec.cli._bench_view import show_result
from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings
from specdec.core.request.metrics import RequestMetrics
from specdec.lab.comparison import run_compare_recorded, variants
from specdec.lab.measure import Step
from specdec.lab.progress import NoProgress
from specdec.lab.report.content import content_of, figure_rows
from specdec.lab.report.page import _view
from specdec.lab.result import tree_facts
from specdec.lab.run import BenchSettings, run_bench
from specdec.lab.why import Traced, misses_of
from specdec.lab.why.run import run_why

TREES = {"method": "suffix", "num_speculative_tokens": 5, "max_nodes": 8}


@pytest.fixture(scope="module")
def result():
    settings = {"num_prompts": 2, "output_len": 24, "repeat": 1, "warmup": 0}
    engine = EngineConfig(model="tiny", max_num_seqs=1)
    return run_bench(BenchSettings(engine=engine, speculative_config=TREES, **settings), PluginSettings(), NoProgress())


def test_facts_of_trees_follow_from_counts():
    counts = RequestMetrics()
    counts.record(6, 2, 3, [3, 2, 1])
    counts.record(2, 0, 1, [2])
    counts.record(0, 0, 1)
    facts = tree_facts(counts)
    assert facts == {
        "nodes": 4,
        "depth": 2,
        "width": 2,
        "nodes_per_depth": [2.5, 1, 0.5],
        "accepted_depth": 1,
        "wasted_nodes": 6,
        "wasted_share": 0.75,
    }
    chains = RequestMetrics()
    chains.record(3, 1, 2)
    assert tree_facts(chains) is None


def test_a_benchmark_counts_nodes_and_says_where_rows_break_even(result):
    trees = result["drafted_trees"]
    assert result["outputs_equal"]
    assert 1 < trees["nodes"] <= 8
    assert trees["depth"] <= 5
    assert sum(trees["nodes_per_depth"]) == pytest.approx(trees["nodes"])
    assert result["configuration"]["speculative_config"]["num_speculative_tokens"] == 5
    rows, plain, step = result["rows_per_step"], result["plain_step_seconds"], result["step_seconds"]
    assert rows == pytest.approx(1 + result["num_draft_tokens"] / result["num_target_steps"])
    if step > plain:
        per_row = (step - plain) / (rows - 1)
        paid = plain + (result["break_even_rows_per_step"] - 1) * per_row
        assert paid == pytest.approx(plain * result["tokens_per_target_step"])


def test_tables_and_pages_show_trees(result):
    shown = io.StringIO()
    show_result(result, Console(file=shown, width=160))
    for words in ("trees of 8 nodes", "Nodes of a tree", "Accepted depth", "nodes wasted", "Draft depth"):
        assert words in shown.getvalue()
    [row] = [each for each in figure_rows(content_of(result)) if each["category"] == "all"]
    assert row["tree_nodes"] == result["drafted_trees"]["nodes"]
    for request in result["requests"]:
        *_, drafts, accepted, _, _, parents = _view(request)
        assert len(parents) == len(accepted)
        for ids, count, above in zip(drafts, accepted, parents, strict=True):
            assert len(above or ()) == len(ids)
            assert list(above or ())[:count] == list(range(-1, count - 1)), "the accepted path stands first"


def test_trees_and_chains_are_compared_on_a_recording():
    asked = variants([TREES, {**TREES, "max_nodes": None}], [])
    found = run_compare_recorded(shared().folder, asked, PluginSettings(), NoProgress(), "tokens_per_target_step")
    by_trees = {row["drafted_trees"] is not None: row for row in found["rows"]}
    assert set(by_trees) == {True, False}
    assert by_trees[True]["speculative_config"]["num_speculative_tokens"] == 5


def traced(steps, token_ids):
    return Traced(
        prompt_id="a",
        category="",
        prompt_token_ids=(1,),
        token_ids=token_ids,
        steps=steps,
        target=lambda place: None,
        proposer=lambda step, position: None,
    )


def test_a_miss_in_a_tree_is_what_was_met_at_the_end_of_the_path():
    met = Step((5, 6, 7, 8), 1, 2, (-1, 0, 0, -1))  # 5 is right; 6 and 7 were met behind it, 8 was not
    [miss] = misses_of(traced([met], (5, 9)))
    assert (miss["position"], miss["draft_token_id"], miss["target_token_id"], miss["num_lost"]) == (1, 6, 9, 3)
    leaf = Step((5, 8), 1, 2, (-1, -1))
    assert misses_of(traced([leaf], (5, 9))) == []


@pytest.mark.slow
def test_why_asks_the_drafter_of_trees_what_its_chain_thinks():
    asked = variants([{"model": "tiny/medusa", "max_nodes": 8}], [])
    [row] = run_why(shared().folder, asked, PluginSettings(), NoProgress())["rows"]
    assert row["proposer_distributions"] == "reported by further replays"
    assert row["trees"]["known_for_width_2"] > 0
