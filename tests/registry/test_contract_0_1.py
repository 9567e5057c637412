"""A package that was written for contract 0.1 runs unchanged."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams

MODULE = Path(__file__).with_name("written_for_0_1.py")
AS_WRITTEN = "2570b217e913d2c8ee81f2f7abee624f5a09671c8ac6b1870ee1720c507f69d7"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def f(n):\n    return f(", "one two one two one"]


@pytest.fixture(scope="module")
def plain():
    with LLM("tiny", max_num_seqs=2, max_model_len=128) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_nobody_has_adapted_it():
    assert hashlib.sha256(MODULE.read_bytes()).hexdigest() == AS_WRITTEN


@pytest.mark.parametrize("keys", [{}, {"draft_sample_method": "probabilistic"}, {"proposer_config": {"most": 2}}])
def test_every_element_of_0_1_still_means_what_it_meant(keys, plain, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(MODULE.parent)
    asked = {"method": "written_for_0_1:Frequent", "state_dir": str(tmp_path / "state")} | keys
    for _ in range(2):  # the second time with what the first one saved
        with warnings.catch_warnings(), LLM("tiny", speculative_config=asked, max_num_seqs=2, max_model_len=128) as llm:
            warnings.simplefilter("error")
            outputs = llm.generate(PROMPTS, [GREEDY, GREEDY.replace(extra_args={"silent": True})])
            drafted = [each.outputs[0].spec_decode_metrics["num_draft_tokens"] for each in outputs]
            assert [each.outputs[0].token_ids for each in outputs] == plain
            assert drafted[0] > 0 == drafted[1]
            assert not any(metric.name.startswith("specdec:proposer_frequent") for metric in llm.get_metrics())


@pytest.mark.parametrize("proposer", ["Meters", "Again"])
def test_names_that_came_later_are_the_authors_own(proposer, plain, monkeypatch):
    monkeypatch.syspath_prepend(MODULE.parent)
    asked = {"method": f"written_for_0_1:{proposer}", "num_speculative_tokens": 2}
    with LLM("tiny", speculative_config=asked, max_num_seqs=2, max_model_len=128) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == plain
        assert not any(metric.name.startswith("specdec:proposer_meters") for metric in llm.get_metrics())
