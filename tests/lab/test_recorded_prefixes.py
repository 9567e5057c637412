"""Replays of prompts that begin alike: they compute a prefix once, as a live engine does, and predict times so."""

from __future__ import annotations

import json

import pytest
from recordings import LAYERS, live_steps, make

from specdec.core.registry import PluginSettings
from specdec.lab.recording import Recording
from specdec.lab.replay.rows import plain_seconds
from specdec.lab.replay.run import replay

PREFIX = "def parse(text):\n    return [line.split(',') for line in text.splitlines() if line]\n\n\n" * 3
CONFIGS = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "eagle3": {"model": "tiny/eagle3", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefixes")
    rows = [{"prompt": f"{PREFIX}def {name}("} for name in ("first", "second", "third")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = {"dataset_name": "custom", "dataset_path": folder / "rows.jsonl", "num_prompts": 0}
    return make(folder / "x", hidden_states=LAYERS, max_num_seqs=1, **asked)


def costing(recording, **engine):
    """The same, of whose target each row costs a second."""
    manifest = recording.manifest
    cost = manifest.cost.replace(rows=(1, 1000), seconds=(1.0, 1000.0))
    return Recording(recording.folder, manifest.replace(cost=cost, engine=manifest.engine | engine))


def num_cached(recording, replayed):
    """Tokens of each prompt that an earlier one had computed: the others are computed in one step."""
    return [len(each.prompt_token_ids) - replayed.rows_of[each.request_id][0] for each in recording]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_replay_computes_what_a_live_run_computes(recording, name):
    replayed = replay(recording, CONFIGS[name])
    steps, engine = live_steps(recording, CONFIGS[name])
    assert replayed.steps == steps
    hits = engine.metrics.counts["prefix_cache_hits"]
    assert sum(num_cached(recording, replayed)) == hits > 0


def test_a_prompt_costs_what_of_it_is_computed(recording):
    alone = costing(recording, enable_prefix_caching=False)
    shared = costing(recording)
    slow, fast = (plain_seconds(each, PluginSettings()) for each in (alone, shared))
    saved = [one - other for one, other in zip(slow, fast, strict=True)]
    assert saved == pytest.approx(num_cached(shared, replay(shared, None)))
    assert saved[0] == 0 < min(saved[1:])


def test_an_engine_that_was_told_not_to_share_is_replayed_so(recording):
    replayed = replay(costing(recording, enable_prefix_caching=False), CONFIGS["ngram"])
    assert num_cached(recording, replayed) == [0, 0, 0]
