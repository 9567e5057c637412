"""Our own core, shown to do what the tests of the adapters show of other engines."""

from __future__ import annotations

import os
from collections import Counter
from importlib.metadata import version

import pytest
from everywhere import Misuser, Witness
from listener import Listener, shown
from tool_calls import in_the_core

from specdec import LLM, SamplingParams
from specdec.sdk import ProposerError
from specdec.sdk.packaged import packaged

ENGINE = f"specdec {version('specdec-sdk')}, CPU"
GREEDY = SamplingParams(temperature=0, max_tokens=48)
WITHOUT_CORPUS = {"suffix_decoding_max_cached_requests": 0}


def make(config, k=4, **settings):
    asked = None if config is None else {"num_speculative_tokens": k} | config
    return LLM("tiny", device="cpu", speculative_config=asked, **{"max_model_len": 512, "max_num_seqs": 8} | settings)


def generate(llm, batch, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(batch):
    """What the core generates greedily without speculation."""
    return generate(make(None), batch)


@pytest.fixture
def record(shown):
    """Note what an engine showed."""

    def note(llm, *capabilities, refused=None):
        calls = [] if llm is None else [(os.getpid(), llm.engine.metrics.counts["proposer_propose_calls"])]
        shown(ENGINE, *capabilities, workers=calls, refused=refused)

    return note


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"method": "ngram"}, {"method": "suffix", "proposer_config": WITHOUT_CORPUS}])
def test_host_proposers_change_no_output(batch, plain, record, config):
    llm = make(config)
    assert generate(llm, batch) == plain
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 20
    record(llm, "host proposers", "several requests at a time")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash", "draft"])
def test_draft_networks_change_no_output(batch, plain, record, name):
    llm = make({"model": f"tiny/{name}"})
    assert generate(llm, batch) == plain
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 20
    record(llm, "a draft network with KV of its own")


@pytest.mark.slow
def test_drafts_change_no_output_of_a_target_with_states(batch, record):
    expected, drafted = (
        LLM("tiny/hybrid", device="cpu", speculative_config=config, max_model_len=512)
        for config in (None, {"method": "mtp", "num_speculative_tokens": 4})
    )
    assert generate(drafted, batch[:2]) == generate(expected, batch[:2])
    record(drafted, "targets whose layers keep a state")


@pytest.mark.slow
def test_a_combinator_changes_no_output(batch, plain, record):
    llm = make({"method": "adapter_proposers:LookUpThenHead", "model": str(packaged("tiny/eagle3"))}, k=3)
    assert generate(llm, batch) == plain
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 20
    record(llm, "several proposers in one (a combinator)")


@pytest.mark.slow
def test_hidden_states_belong_to_the_kept_rows_and_the_targets_head_is_shared(batch, plain, record):
    llm = make({"method": "everywhere:EarlyExit", "on_proposer_error": "raise"})
    assert generate(llm, batch) == plain
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 0
    record(llm, "hidden states, final and between layers", "the target's embedding and head")


TARGETS_VIEW = {
    "the target's most likely tokens": {"method": "specdec.plugins.token_recycling:TokenRecyclingProposer"},
    "the target's keys and values": {"method": "everywhere:CacheReader"},
    "the target's own layers": {
        "method": "specdec.plugins.layer_skip.proposer:LayerSkipProposer",
        "proposer_config": {"exit_layer": 6},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS_VIEW)
def test_what_is_shown_of_the_target_changes_no_output(batch, plain, record, capability):
    llm = make(TARGETS_VIEW[capability] | {"on_proposer_error": "raise"})
    assert generate(llm, batch) == plain
    record(llm, capability)


@pytest.mark.slow
def test_forced_text_is_drafted_and_changes_no_output(batch, record):
    plain, _ = in_the_core(batch, None)
    outputs, acceptance = in_the_core(batch, {"method": "forced", "num_speculative_tokens": 6})
    assert outputs == plain
    assert acceptance.num_accepted_tokens > 20
    record(None, "grammars of requests")


@pytest.mark.slow
def test_no_misuse_ends_the_engine(batch, plain, record):
    llm = make({"method": "everywhere:Misuser", "on_proposer_error": "skip_step"})
    assert [generate(llm, batch), generate(llm, batch)] == [plain, plain]
    assert set(llm.engine.metrics.proposer_errors) == {"SD-E200", "SD-E201", "SD-E203", "SD-E210"}
    record(llm, "misuse ends nothing", "a failing proposer is handled as asked")


@pytest.mark.slow
def test_listeners_are_shown_the_logits_that_chose_each_token(batch, plain, record):
    llm = make({"method": "ngram"})
    Listener.seen.clear()
    llm.add_hooks(Listener())
    assert generate(llm, batch) == plain
    assert shown(Listener.seen) == (
        sorted(text for (text,) in plain),
        llm.engine.metrics.acceptance.num_accepted_tokens,
    )
    record(llm, "listeners are shown what was verified")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["disable", "raise"])
def test_errors_are_handled_as_asked(batch, plain, record, policy):
    llm = make({"method": "everywhere:Misuser", "on_proposer_error": policy})
    if policy == "raise":
        with pytest.raises(ProposerError, match=Misuser.__name__):
            generate(llm, batch)
    else:
        assert generate(llm, batch) == plain
        assert llm.engine.metrics.counts["proposer_propose_calls"] == 3
    record(llm, "a failing proposer is handled as asked")


@pytest.mark.full
def test_chunks_and_preemptions_are_told_and_change_nothing(batch, record):
    tight = {"max_num_batched_tokens": 48, "num_kv_blocks": 26, "max_model_len": 320}
    params = GREEDY.replace(max_tokens=100, ignore_eos=True)
    Witness.events.clear()
    llm = make({"method": "everywhere:Witness", "on_proposer_error": "raise"}, **tight)
    assert generate(llm, batch, params) == generate(make(None, **tight), batch, params)
    events = Counter(Witness.events)
    assert events["start"] == events["finish"] == len(batch)
    assert events["preempt"] > 0
    assert events["PREFILL"] > 0
    record(llm, "start and finish are told, rows are stable", "prompts in chunks", "preemption is told")


def test_sampling_parameters_are_shown(batch, record):
    asked = {"temperature": 0.75, "top_k": 5}
    Witness.events.clear()
    llm = make({"method": "everywhere:Witness", "on_proposer_error": "raise", "proposer_config": asked})
    generate(llm, batch, SamplingParams(max_tokens=8, seed=1, **asked))
    assert Witness.events["DECODE"] > len(batch)
    record(llm, "sampling parameters")


@pytest.mark.slow
def test_reported_distributions_reach_the_verifier(batch, record):
    """The target drafts for itself: with its q every draft is accepted."""
    itself = {
        "method": "draft_model",
        "model": str(packaged("tiny")),
        "proposer_config": {"draft_distribution": "dense"},
    }
    llm = make(itself | {"draft_sample_method": "probabilistic"})
    generate(llm, batch, SamplingParams(temperature=1.0, max_tokens=48, seed=1))
    assert llm.engine.metrics.acceptance.draft_acceptance_rate > 0.99
    record(llm, "draft probabilities in verification")


@pytest.mark.full
def test_sampled_text_follows_the_targets_distribution(batch, record, two_token_distribution):
    """Two tokens of a prompt, 1000 times: the first is sampled plainly, the second where a draft is verified."""
    num_samples, top_k, prompt = 1000, 3, batch[1][:16]
    llm = make({"model": "tiny/eagle3", "draft_sample_method": "probabilistic"}, k=2, max_num_seqs=64)
    params = SamplingParams(temperature=1.0, top_k=top_k, n=num_samples, max_tokens=3, ignore_eos=True, seed=7)
    ((*samples,),) = generate(llm, [prompt], params)
    assert 0 < llm.engine.metrics.acceptance.draft_acceptance_rate < 1
    seen = Counter((one[0], one[1]) for one in samples)
    distribution = two_token_distribution(prompt, top_k)
    assert set(seen) <= set(distribution), "a token outside the target's filter"
    chi_square = sum((seen[pair] - num_samples * p) ** 2 / (num_samples * p) for pair, p in distribution.items())
    assert chi_square < 31.8, "8 degrees of freedom: 1 in 10,000 seeds gives more"
    record(llm, "sampled text follows the target's distribution")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "capability"),
    [
        ("foreign_classes.Lookup", "classes written for vLLM's custom_class"),
        (
            "transformers.generation.candidate_generator.PromptLookupCandidateGenerator",
            "candidate generators of transformers",
        ),
    ],
)
def test_classes_written_for_other_engines_change_no_output(batch, plain, record, path, capability):
    llm = make({"model": path})
    assert generate(llm, batch) == plain
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 20
    record(llm, capability)


@pytest.mark.slow
def test_trees_change_no_output(batch, plain, record):
    llm = make({"method": "everywhere:Tree", "on_proposer_error": "raise"})
    assert generate(llm, batch) == plain
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 20
    record(llm, "drafts in trees")
