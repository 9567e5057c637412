"""Proposers inside vLLM's V2 model runner: what it generates with them is what it generates without."""

from __future__ import annotations

import re

import pytest
from everywhere import VOCAB_SIZE
from tool_calls import CALL
from tool_calls import SAMPLING as SAMPLING_OF_CALLS
from tool_calls import in_the_core as in_the_core_under_grammars

from specdec import LLM, SamplingParams

pytestmark = pytest.mark.full

NO_CORPUS = {"proposer_config": {"suffix_decoding_max_cached_requests": 0}}
POLICIES = "a failing proposer is handled as asked"
DRAFTED = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def in_the_core(prompts, method, specdec, k, max_model_len=512, **sampling):
    """What our own engine returns for the same prompts, and how many drafts it accepted in all."""
    config = {"method": method, "num_speculative_tokens": k} | specdec
    llm = LLM("tiny", speculative_config=config, max_model_len=max_model_len, max_num_seqs=8)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 48} | sampling)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return outputs, of_drafts(llm.engine.metrics.acceptance.as_dict())


def same_in_the_core(prompts, method, specdec, k, **more):
    """Outputs and acceptance of our own engine on the same prompts."""
    outputs, accepted = in_the_core(prompts, method, specdec, k, **more)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs], accepted


def of_drafts(facts):
    return {name: facts[name] for name in DRAFTED}


def counts(run):
    return of_drafts(run["reports"][0])


@pytest.mark.parametrize(("method", "specdec"), [("ngram", {}), ("suffix", NO_CORPUS)])
def test_host_proposers_generate_what_plain_vllm_does_and_are_accepted_as_in_the_core(
    run_engine, plain, batch, record, method, specdec
):
    run = run_engine(method, specdec=specdec)
    outputs, accepted = same_in_the_core(batch, method, specdec, k=4)
    assert run["error"] is None
    assert run["v2"]
    assert run["outputs"][0] == plain == outputs
    assert counts(run) == accepted
    assert accepted["num_accepted_draft_tokens"] > 20
    record(run, "host proposers", "several requests at a time")


@pytest.mark.parametrize("method", ["eagle3", "dflash", "draft_model"])
def test_draft_networks_keep_their_kv_in_vllms_pages_and_are_accepted_as_in_the_core(
    run_engine, plain, batch, record, tiny_drafter, method
):
    specdec = {"model": tiny_drafter(method)}
    run = run_engine(method, specdec=specdec)
    _, accepted = same_in_the_core(batch, method, specdec, k=4)
    assert run["error"] is None
    assert run["v2"]
    assert run["outputs"][0] == plain
    assert counts(run) == accepted
    record(run, "a draft network with KV of its own")


def test_states_between_layers_belong_to_the_kept_rows_and_the_targets_head_is_shared(run_engine, plain, record):
    run = run_engine("Configured", specdec={"method": "everywhere:EarlyExit"})
    assert run["outputs"][0] == plain
    assert run["reports"][0]["errors"] == {}, "the proposer checks each step"
    assert run["reports"][0]["num_accepted_draft_tokens"] > 0
    record(run, "hidden states, final and between layers", "the target's embedding and head")


def test_the_targets_most_likely_tokens_are_shown_and_recycled_as_in_the_core(run_engine, plain, batch, record):
    run = run_engine("token_recycling")
    _, accepted = same_in_the_core(batch, "token_recycling", {}, k=4)
    assert run["error"] is None
    assert run["outputs"][0] == plain
    assert run["reports"][0]["errors"] == {}
    assert counts(run) == accepted
    record(run, "the target's most likely tokens")


def test_no_misuse_kills_the_engine(run_engine, plain, batch, record):
    misuser = {"method": "everywhere:Misuser", "on_proposer_error": "skip_step"}
    run = run_engine("Configured", specdec=misuser, batches=[batch, batch])
    assert run["outputs"] == [plain, plain]
    assert set(run["reports"][0]["errors"]) == {"SD-E200", "SD-E201", "SD-E203", "SD-E210"}
    assert sum(run["reports"][0]["errors"].values()) == run["reports"][0]["propose_calls"]
    record(run, "misuse ends nothing", POLICIES)


def test_a_failing_proposer_is_switched_off_after_three_errors_unless_asked_otherwise(run_engine, plain, record):
    run = run_engine("Configured", specdec={"method": "everywhere:Misuser"})
    assert run["outputs"][0] == plain
    assert run["reports"][0]["propose_calls"] == 3
    record(run, POLICIES)


def test_raise_stops_the_engine_with_the_authors_line_and_leaves_the_process_whole(run_engine, plain, record):
    run = run_engine("Configured", specdec={"method": "everywhere:Misuser", "on_proposer_error": "raise"})
    assert "SD-E203" in run["error"]
    assert "everywhere:Misuser" in run["error"]
    assert run_engine()["outputs"][0] == plain
    record(run, POLICIES)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_chunks_and_preemptions_are_told_and_change_nothing(run_engine, batch, record, asynchronous):
    tight = {
        "max_num_batched_tokens": 48,
        "max_model_len": 320,
        "num_gpu_blocks_override": 12,  # a prompt takes two, and three in the end
        "enable_prefix_caching": False,
        "async_scheduling": asynchronous,
    }
    witness = {"method": "everywhere:Witness", "on_proposer_error": "raise"}
    few, long = [[ids[:40] for ids in batch[:6]]], {"max_tokens": 40, "ignore_eos": True}
    plain_tight = run_engine(batches=few, sampling=long, **tight)
    run = run_engine("Configured", specdec=witness, batches=few, sampling=long, **tight)
    assert run["error"] is None
    assert run["outputs"] == plain_tight["outputs"]
    events = run["events"]
    assert events["start"] == events["finish"] == 6
    assert events["preempt"] > 0
    assert events["PREFILL"] > 0
    told = ("start and finish are told, rows are stable", "prompts in chunks", "preemption is told")
    record(run, *told, *(["asynchronous scheduling"] if asynchronous else []))


@pytest.fixture(scope="module")
def plain_calls(run_engine):
    """What vLLM generates greedily under grammars without speculation."""
    run = run_engine(sampling=SAMPLING_OF_CALLS)
    assert run["error"] is None
    return run["outputs"][0]


@pytest.mark.parametrize("proposer", ["forced", "ForcedThenLookUp", "ForcedThenHead"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_forced_text_is_drafted_as_in_the_core(
    run_engine, plain_calls, batch, record, tiny_drafter, proposer, asynchronous
):
    """Requests with and without a grammar run side by side. Asynchronous scheduling fills drafts up."""
    specdec = {"method": "forced" if proposer == "forced" else f"adapter_proposers:{proposer}"}
    specdec |= {"model": tiny_drafter("eagle3")} if proposer == "ForcedThenHead" else {}
    run = run_engine("Configured", k=6, specdec=specdec, sampling=SAMPLING_OF_CALLS, async_scheduling=asynchronous)
    assert run["error"] is None
    assert run["outputs"][0] == plain_calls
    outputs, acceptance = in_the_core_under_grammars(batch, specdec | {"num_speculative_tokens": 6})
    assert outputs == plain_calls
    assert run["reports"][0]["errors"] == {}
    assert "not told of this grammar" not in run["log"]
    found, expected = counts(run), of_drafts(acceptance.as_dict())
    assert found["num_accepted_draft_tokens"] >= expected["num_accepted_draft_tokens"] > 20
    if not asynchronous:
        assert found["num_accepted_draft_tokens"] == expected["num_accepted_draft_tokens"]
    record(run, "grammars of requests")


def test_a_preempted_request_begins_its_grammar_again(run_engine, batch):
    """With asynchronous scheduling it also gives up the tokens of the step that was under way."""
    tight = {"max_model_len": 320, "num_gpu_blocks_override": 12, "enable_prefix_caching": False}
    asked = {"structured_outputs": {"json": CALL}, "max_tokens": 60}
    prompts, settings = [[ids[:40] for ids in batch[:6]]], tight | {"async_scheduling": True}
    plain_tight = run_engine(batches=prompts, sampling=asked, **settings)
    forced = {"method": "everywhere:ForcedWitness"}
    run = run_engine("Configured", k=6, specdec=forced, batches=prompts, sampling=asked, **settings)
    assert run["error"] is None
    assert run["outputs"] == plain_tight["outputs"]
    assert run["events"]["preempt"] > 0
    config = {"method": "forced", "num_speculative_tokens": 6}
    _, acceptance = in_the_core_under_grammars(prompts[0], config, [asked] * 6)
    assert counts(run)["num_accepted_draft_tokens"] > 0.9 * acceptance.num_accepted_tokens, "a preemption loses a draft"


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_asynchronous_scheduling_changes_neither_text_nor_drafts(
    run_engine, plain, batch, record, tiny_drafter, method
):
    """It fills drafts up to K tokens; a token that was right by chance is an accepted one."""
    specdec = {"model": tiny_drafter(method)} if method == "eagle3" else {}
    run = run_engine(method, specdec=specdec, async_scheduling=True)
    _, accepted = same_in_the_core(batch, method, specdec, k=4)
    assert run["error"] is None
    assert run["outputs"][0] == plain
    assert counts(run)["num_accepted_draft_tokens"] >= accepted["num_accepted_draft_tokens"]
    assert counts(run)["num_spec_steps"] <= accepted["num_spec_steps"]
    record(run, "asynchronous scheduling")


def test_vllms_own_metrics_of_each_request_are_those_of_the_core(run_engine, plain, batch):
    run = run_engine("ngram", per_request_spec_decode_metrics="summary")
    assert run["error"] is None
    assert run["outputs"][0] == plain
    outputs, _ = in_the_core(batch, "ngram", {}, k=4)
    of_requests = [of_drafts(each) for (each,) in run["accepted"][0]]
    assert of_requests == [of_drafts(output.outputs[0].spec_decode_metrics) for output in outputs]
    assert [sum(each[name] for each in of_requests) for name in DRAFTED] == list(counts(run).values())


def test_drafts_that_stay_on_the_device_are_verified_and_read_a_step_later(run_engine, plain, record):
    settings = {"method": "everywhere:OnDevice", "on_proposer_error": "raise"}
    run = run_engine("Configured", specdec=settings, async_scheduling=True)
    assert run["error"] is None
    assert run["outputs"][0] == plain
    assert run["reports"][0]["num_accepted_draft_tokens"] > 0
    record(run, "asynchronous scheduling")


def test_vllms_own_metrics_are_those_of_the_core_and_a_request_may_ask_for_fewer_drafts(run_engine, plain, batch):
    fewer = [{"extra_args": {"specdec": {"num_speculative_tokens": 1}}}] * len(batch)
    run = run_engine("ngram", sampling=fewer, disable_log_stats=False)
    assert run["error"] is None
    assert run["outputs"][0] == plain
    metrics, own = run["metrics"], counts(run)
    assert metrics["vllm:spec_decode_num_draft_tokens"] == own["num_draft_tokens"]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == own["num_accepted_draft_tokens"] > 0
    assert own["num_draft_tokens"] == own["num_spec_steps"], "one draft in each step"


def test_reported_distributions_reach_the_verifier(run_engine, vllm_target, record):
    """The target drafts for itself: with its q every draft is accepted, without q about as many as p is peaked."""
    itself = {"model": str(vllm_target), "proposer_config": {"draft_distribution": "dense"}}
    probabilistic = {"draft_sample_method": "probabilistic"}
    sampled = {"temperature": 0.7, "seed": 1}
    run = run_engine("draft_model", specdec=itself, sampling=sampled, speculative=probabilistic)
    assert run["error"] is None
    assert run["reports"][0]["draft_acceptance_rate"] > 0.99
    record(run, "draft probabilities in verification")


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_two_tensor_parallel_workers_verify_the_same_drafts_and_generate_what_one_does(
    run_engine, plain, record, tiny_drafter, method
):
    specdec = {"model": tiny_drafter(method)} if method == "eagle3" else {}
    run = run_engine(method, specdec=specdec, tensor_parallel_size=2)
    assert run["error"] is None
    assert run["outputs"][0] == plain
    first, second = run["reports"]
    assert first["pid"] != second["pid"]
    assert first["propose_calls"] == second["propose_calls"] > 0
    assert counts(run) == {name: second[name] for name in DRAFTED}
    record(run, "two tensor-parallel workers")


def test_a_combinator_runs_as_one_proposer(run_engine, plain, record, tiny_drafter):
    chain = {"method": "adapter_proposers:LookUpThenHead", "model": tiny_drafter("eagle3")}
    run = run_engine("Configured", k=3, specdec=chain)
    assert run["outputs"][0] == plain
    assert run["reports"][0]["num_accepted_draft_tokens"] > 20
    record(run, "several proposers in one (a combinator)")


TREES = {
    "a proposer of its own": {"method": "everywhere:TreeWitness", "on_proposer_error": "raise"},
    "eagle3": {"model": "tiny/eagle3", "max_nodes": 12, "on_proposer_error": "raise"},
}


@pytest.mark.parametrize("name", TREES)
def test_of_trees_the_best_path_is_verified(run_engine, plain, record, name):
    run = run_engine("Configured", specdec=TREES[name])
    assert run["error"] is None
    assert run["outputs"][0] == plain
    assert run["reports"][0]["num_accepted_draft_tokens"] > 20
    record(run, "drafts in trees")


def test_sampling_parameters_are_shown(run_engine, batch, record):
    asked = {"temperature": 0.75, "top_k": VOCAB_SIZE}  # for a smaller top_k vLLM runs a kernel that needs a GPU
    witness = {"method": "everywhere:Witness", "on_proposer_error": "raise", "proposer_config": asked}
    run = run_engine("Configured", specdec=witness, sampling={"max_tokens": 4, "seed": 1} | asked)
    assert run["error"] is None
    assert run["events"]["DECODE"] > len(batch)
    record(run, "sampling parameters")


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_a_request_at_the_longest_length_costs_nobody_else_drafts(run_engine, batch, tiny_drafter, method):
    """Nor does a draft pass that writes past that length overwrite what others have in vLLM's pages."""
    specdec = {"model": tiny_drafter(method)} if method == "eagle3" else {}
    longest = max(map(len, batch)) + 20
    long = {"max_tokens": 60, "ignore_eos": True}
    run = run_engine(method, specdec=specdec, max_model_len=longest, sampling=long)
    outputs, accepted = same_in_the_core(batch, method, specdec, 4, max_model_len=longest, **long)
    assert run["outputs"][0] == outputs
    assert counts(run) == accepted
    assert max(len(ids) + len(out[0]) for ids, out in zip(batch, outputs, strict=True)) == longest


def test_a_run_that_keeps_idle_ranks_in_step_is_a_dummy_step(run_engine, plain):
    witness = {"method": "everywhere:SeesIdleSteps", "on_proposer_error": "raise"}
    run = run_engine("Configured", specdec=witness, begins_with="an idle step")
    assert run["error"] is None, run["log"][-4000:]
    assert run["outputs"][0] == plain


@pytest.mark.parametrize("method", ["everywhere:Witness", "eagle3"])
def test_requests_that_vllm_makes_up_are_shown_to_no_proposer(run_engine, plain, tiny_drafter, method):
    specdec = {"method": method, "on_proposer_error": "raise"}
    specdec |= {"model": tiny_drafter(method)} if method == "eagle3" else {}
    run = run_engine("Configured", specdec=specdec, begins_with="a warm-up", async_scheduling=True)
    assert run["error"] is None, run["error"]
    assert run["outputs"][0] == plain
    if method != "eagle3":
        assert run["events"]["start"] == run["events"]["finish"] == len(plain)


def test_a_sampling_that_vllm_takes_and_we_would_not_ends_nothing(run_engine, batch):
    odd = {"temperature": 1.0, "top_k": 2**31 + 5, "ignore_eos": True}
    run = run_engine("ngram", batches=[batch[:2]], sampling=odd)
    assert run["error"] is None, run["error"]
    assert [len(text) for (text,) in run["outputs"][0]] == [48, 48]


REFUSED = {
    "pipeline parallelism": (
        {"method": "ngram"},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        "the last stage",
    ),
    "the target's keys and values": ({"method": "everywhere:CacheReader"}, {}, "vLLM's cache is laid out"),
    "the target's own layers": (
        {"method": "specdec.plugins.layer_skip.proposer:LayerSkipProposer", "proposer_config": {"exit_layer": 6}},
        {},
        "its layers run over that",
    ),
}


@pytest.mark.parametrize("capability", REFUSED)
def test_what_cannot_survive_is_refused_in_the_first_process_with_the_reason(run_engine, record, capability):
    proposer, engine, reason = REFUSED[capability]
    run = run_engine("Configured", specdec=proposer, **engine)
    assert run["outputs"] == []
    said = re.search(rf"(?:.*error, )?(.*{re.escape(reason)}.*?)(?: \[type=.*)?$", run["error"], flags=re.MULTILINE)
    assert said, run["error"]
    record(run, capability, refused=re.sub(r"^ *reason +", "", said[1]))
