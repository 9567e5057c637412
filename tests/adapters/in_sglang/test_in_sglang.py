"""Proposers inside a real SGLang, on a CPU: its text, our acceptance, requests that come and go, and a failure."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from drafter_servers import served
from sglang_process import in_process

from specdec import LLM, SamplingParams

pytestmark = pytest.mark.full
HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "run-in-sglang.md"
NGRAM = {"method": "ngram", "proposer_config": {"prompt_lookup_max": 3}}


@pytest.fixture(scope="module")
def with_ngram(sglang):
    return sglang(NGRAM)


def test_text_is_that_of_plain_sglang(plain, with_ngram, record):
    assert with_ngram["texts"] == plain["texts"]
    assert with_ngram["report"]["num_accepted_draft_tokens"] > 20
    assert with_ngram["report"]["errors"] == {}
    assert plain["report"] is None
    record("host proposers", "several requests at a time", run=with_ngram)


UNCHANGED = {
    "several proposers in one (a combinator)": {"method": "sglang_proposers:LookUpThenSuffix"},
    "drafts in trees": {"method": "everywhere:Tree"},
    "classes written for vLLM's custom_class": {"method": "foreign_classes:Lookup"},
    "candidate generators of transformers": {
        "model": "transformers.generation.candidate_generator.PromptLookupCandidateGenerator"
    },
}


@pytest.mark.parametrize("capability", UNCHANGED)
def test_the_classes_of_other_engines_draft_unchanged(plain, sglang, record, capability):
    run = sglang(UNCHANGED[capability] | {"on_proposer_error": "raise"})
    assert run["texts"] == plain["texts"]
    assert run["report"]["num_accepted_draft_tokens"] > 10
    assert run["report"]["errors"] == {}
    record(capability, run=run)


def counts(run):
    return {name: found for name, found in run["report"].items() if name not in ("proposer", "figures")}


def test_a_process_of_its_own_drafts_as_one_process_does(plain, with_ngram, sglang, record):
    run = sglang(NGRAM | {"isolation": "process"})
    assert run["texts"] == plain["texts"]
    assert counts(run) == counts(with_ngram)
    assert run["report"]["figures"]["proposer_ngram_process_restarts"] == 0
    record("a drafter in a process of its own", run=run)


def test_a_server_drafts_as_one_process_does(plain, with_ngram, sglang, record, tmp_path):
    options = NGRAM["proposer_config"]
    with served("ngram", f"ipc://{tmp_path}/drafter", proposer_config=options) as (_, address):
        run = sglang({"method": "remote", "proposer_config": {"address": address}})
    assert run["texts"] == plain["texts"]
    assert counts(run) == counts(with_ngram)
    assert run["report"]["figures"]["proposer_remote_up"] == 1
    record("a drafter that a server runs", run=run)


def test_no_misuse_ends_the_engine(plain, sglang, record):
    run = sglang({"method": "everywhere:Misuser", "on_proposer_error": "skip_step"})
    assert run["texts"] == plain["texts"]
    assert set(run["report"]["errors"]) == {"SD-E200", "SD-E201", "SD-E203", "SD-E210"}
    assert sum(run["report"]["errors"].values()) == run["report"]["propose_calls"]
    record("misuse ends nothing", "a failing proposer is handled as asked", run=run)


def test_as_many_drafts_are_accepted_as_in_our_engine(with_ngram, vllm_target, prompts_of_text):
    llm = LLM(
        str(vllm_target), dtype="float32", max_num_seqs=4, speculative_config=NGRAM | {"num_speculative_tokens": 4}
    )
    outputs = llm.generate(prompts_of_text, SamplingParams(temperature=0, max_tokens=48))
    assert [output.outputs[0].text for output in outputs] == [text for text, _ in with_ngram["texts"]]
    ours, theirs = llm.engine.metrics.acceptance.as_dict(), with_ngram["report"]
    for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps", "num_target_steps"):
        assert theirs[name] == ours[name], name


def test_requests_that_start_are_taken_back_end_or_are_left_are_told(plain, sglang, record, tmp_path):
    config = {"method": "sglang_proposers:Diary", "proposer_config": {"path": str(tmp_path / "diary")}}
    run = sglang(config, leaves=True, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="5")
    assert run["texts"] == plain["texts"]
    assert run["left"] == "abort"
    assert run["report"]["errors"] == {}
    lines = [line.split(" ") for line in (tmp_path / "diary").read_text().splitlines()]
    count = Counter(event for event, *_ in lines)
    assert count["start"] == count["finish"] == len(plain["texts"]) + 1
    assert 0 < count["preempt"] <= run["retractions"], "told where a step ran without it"
    ends = {name: reason for event, name, reason in lines if event == "finish"}
    assert ends.pop("left") == "abort"
    assert ends == {f"request-{i}": reason["type"] for i, (_, reason) in enumerate(plain["texts"])}
    record("start and finish are told, rows are stable", "preemption is told", "sampling parameters", run=run)


def test_a_failing_proposer_is_switched_off_and_the_text_goes_on(plain, sglang, record):
    run = sglang({"method": "sglang_proposers:Fails"})
    assert run["texts"] == plain["texts"]
    assert run["report"]["enabled"] is False
    assert sum(run["report"]["errors"].values()) == run["report"]["propose_calls"] == 3
    assert "on purpose" in run["log"]
    record("a failing proposer is handled as asked", run=run)


LAYER_SKIP = {"method": "specdec.plugins.layer_skip.proposer:LayerSkipProposer", "proposer_config": {"exit_layer": 6}}
REFUSED = {
    "a draft network with KV of its own": ({"method": "everywhere:KVWitness"}, "DraftKV was not tried"),
    "hidden states, final and between layers": ({"method": "everywhere:EarlyExit"}, "the target's hidden states"),
    "the target's most likely tokens": ({"method": "token_recycling"}, "TargetTokens was not tried"),
    "the target's keys and values": ({"method": "everywhere:CacheReader"}, "SGLang's cache is its own"),
    "the target's own layers": (LAYER_SKIP, "SGLang's cache is its own"),
}


@pytest.mark.parametrize("capability", REFUSED)
def test_what_cannot_draft_there_keeps_sglang_from_starting(sglang, record, capability):
    config, why = REFUSED[capability]
    with pytest.raises(AssertionError, match="SD-E121") as ended:
        sglang(config)
    reason = re.search(rf"^ *reason +(.*{re.escape(why)}.*)$", str(ended.value), flags=re.MULTILINE)
    assert reason, ended.value
    record(capability, refused=reason[1])


def test_the_how_to_runs_as_it_is_written(plain, sglang_environment, vllm_target, tmp_path):
    block = re.search(r"```py\n(.*?)```", HOW_TO.read_text(), flags=re.DOTALL)[1]
    script = tmp_path / "served.py"
    script.write_text(block.replace("path/to/target", str(vllm_target)))
    printed = in_process([script], "", sglang_environment)
    assert plain["texts"][2][0][:40] in printed, printed
    assert "'proposer': 'specdec-sdk:ngram', 'enabled': True" in printed, printed
