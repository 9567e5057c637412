"""Proposers inside the real vLLM: what it generates with them is what it generates without."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from grammar_of_five import ENGINE, OTHER, PROMPT, SAMPLING, chi_square, write_target
from likely_pairs import REFUSING, TEMPERATURE, Grammar, likely_pairs
from likely_pairs import chi_square as chi_square_of_pairs
from listener import shown
from lora_adapter import write_adapter
from tool_calls import SAMPLING as SAMPLING_OF_CALLS
from tool_calls import in_the_core
from vllm_process import LISTENING, job_of, write_distribution

from specdec import LLM, SamplingParams
from specdec.adapters.export import hand_over
from specdec.core.registry import PluginSettings
from specdec.sdk.packaged import packaged

pytestmark = pytest.mark.full

NO_CORPUS = {"proposer_config": {"suffix_decoding_max_cached_requests": 0}}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
KEEPS_KV = {"enable_prefix_caching": False}
POLICIES = "a failing proposer is handled as asked"
DRAFTED = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def same_in_the_core(prompts, method, specdec, k, max_model_len=512, **sampling):
    """Acceptance and outputs of our own engine on the same prompts."""
    config = {"method": method, "num_speculative_tokens": k} | specdec
    llm = LLM("tiny", speculative_config=config, max_model_len=max_model_len, max_num_seqs=8)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 48} | sampling)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    facts = llm.engine.metrics.acceptance.as_dict()
    return [[list(one.token_ids) for one in output.outputs] for output in outputs], {k: facts[k] for k in DRAFTED}


def counts(run):
    return {name: run["reports"][0][name] for name in DRAFTED}


@pytest.mark.parametrize(("method", "specdec"), [("ngram", {}), ("suffix", NO_CORPUS)])
def test_host_proposers_generate_what_plain_vllm_does_and_are_accepted_as_in_the_core(
    run_engine, plain, prompts, record, method, specdec
):
    run = run_engine(method, specdec=specdec)
    outputs, accepted = same_in_the_core(prompts, method, specdec, k=4)
    assert run["error"] is None
    assert run["outputs"][0] == plain == outputs
    assert counts(run) == accepted
    assert accepted["num_accepted_draft_tokens"] > 20
    record(run, "host proposers", "several requests at a time")


@pytest.mark.parametrize("method", ["eagle3", "dflash", "draft_model"])
def test_draft_networks_generate_what_plain_vllm_does_and_are_accepted_as_in_the_core(
    run_engine, plain, prompts, record, tiny_drafter, method
):
    specdec = {"model": tiny_drafter(method)}
    run = run_engine(method, specdec=specdec, **KEEPS_KV)
    _, accepted = same_in_the_core(prompts, method, specdec, k=4)
    assert run["error"] is None
    assert run["outputs"][0] == plain
    assert counts(run) == accepted
    record(run, "a draft network with KV of its own")


def test_states_between_layers_belong_to_the_kept_rows_and_the_targets_head_is_shared(run_engine, plain, record):
    run = run_engine("Configured", specdec={"method": "everywhere:EarlyExit"})
    assert run["outputs"][0] == plain
    assert run["reports"][0]["errors"] == {}, "the proposer checks each step"
    assert run["reports"][0]["num_accepted_draft_tokens"] > 0
    record(run, "hidden states, final and between layers", "the target's embedding and head")


def test_the_targets_most_likely_tokens_are_shown_and_recycled_as_in_the_core(run_engine, plain, prompts, record):
    run = run_engine("token_recycling")
    _, accepted = same_in_the_core(prompts, "token_recycling", {}, k=4)
    assert run["error"] is None
    assert run["outputs"][0] == plain
    assert run["reports"][0]["errors"] == {}
    assert counts(run) == accepted
    record(run, "the target's most likely tokens")


def test_no_misuse_kills_the_engine(run_engine, plain, prompts, record):
    misuser = {"method": "everywhere:Misuser", "on_proposer_error": "skip_step"}
    run = run_engine("Configured", specdec=misuser, batches=[prompts, prompts])
    assert run["outputs"] == [plain, plain]
    assert set(run["reports"][0]["errors"]) == {"SD-E200", "SD-E201", "SD-E203", "SD-E210"}
    assert sum(run["reports"][0]["errors"].values()) == run["reports"][0]["propose_calls"]
    record(run, "misuse ends nothing", POLICIES)


def test_a_failing_proposer_is_switched_off_after_three_errors_unless_asked_otherwise(run_engine, plain, record):
    run = run_engine("Configured", specdec={"method": "everywhere:Misuser"})
    assert run["outputs"][0] == plain
    assert run["reports"][0]["propose_calls"] == 3
    record(run, POLICIES)


def test_raise_stops_the_engine_with_the_authors_line(run_engine, record):
    run = run_engine("Configured", specdec={"method": "everywhere:Misuser", "on_proposer_error": "raise"})
    assert "SD-E203" in run["error"]
    assert "everywhere:Misuser" in run["error"]
    record(run, POLICIES)


def test_listeners_are_shown_the_logits_that_chose_each_token(run_job, vllm_target, prompts, plain, record, tmp_path):
    write_distribution(tmp_path, "listening", LISTENING)
    run = run_job(job_of(vllm_target, prompts, "ngram", max_num_batched_tokens=48), [str(tmp_path)])
    assert run["outputs"] == [plain]
    texts, num_accepted = shown(run["verified"])
    assert texts == sorted(text for (text,) in plain)
    assert num_accepted == run["reports"][0]["num_accepted_draft_tokens"] > 20
    record(run, "listeners are shown what was verified")


def test_chunks_and_preemptions_are_told_and_change_nothing(run_engine, prompts, record):
    tight = {
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "block_size": 32,
        "max_model_len": 320,
        "num_gpu_blocks_override": 16,
        "enable_prefix_caching": False,
    }
    witness = {"method": "everywhere:Witness", "on_proposer_error": "raise"}
    plain_tight = run_engine(**tight, sampling={"max_tokens": 100, "ignore_eos": True})
    run = run_engine("Configured", specdec=witness, sampling={"max_tokens": 100, "ignore_eos": True}, **tight)
    assert run["error"] is None
    assert run["outputs"] == plain_tight["outputs"]
    events = Counter(run["events"])
    assert events["start"] == events["finish"] == len(prompts)
    assert events["preempt"] > 0
    assert events["PREFILL"] > 0
    record(run, "start and finish are told, rows are stable", "prompts in chunks", "preemption is told")


def test_sampling_parameters_are_shown(run_engine, prompts, record):
    asked = {"temperature": 0.75, "top_k": 5}
    witness = {"method": "everywhere:Witness", "on_proposer_error": "raise", "proposer_config": asked}
    run = run_engine("Configured", specdec=witness, sampling={"max_tokens": 8, "seed": 1} | asked)
    assert run["error"] is None
    assert run["events"]["DECODE"] > len(prompts)
    record(run, "sampling parameters")


@pytest.mark.parametrize("method", ["ngram", "eagle3", "dflash"])
def test_requests_with_a_lora_adapter_generate_what_they_do_without_speculation(
    run_engine, plain, record, tiny_drafter, vllm_target, tmp_path, method
):
    lora = write_adapter(tmp_path, vllm_target)
    specdec = {} if method == "ngram" else {"model": tiny_drafter(method)}
    adapted = run_engine(lora=lora, **KEEPS_KV)["outputs"][0]
    assert sum(one != other for one, other in zip(adapted, plain, strict=True)) >= 4, "it says something else"
    run = run_engine(method, specdec=specdec, lora=lora, **KEEPS_KV)
    assert run["error"] is None
    assert run["outputs"][0] == adapted
    assert run["reports"][0]["errors"] == {}
    assert run["reports"][0]["num_accepted_draft_tokens"] > 0
    record(run, "requests with LoRA adapters")


def test_a_combinator_runs_as_one_proposer(run_engine, plain, record, tiny_drafter):
    chain = {"method": "adapter_proposers:LookUpThenHead", "model": tiny_drafter("eagle3")}
    run = run_engine("Configured", k=3, specdec=chain, **KEEPS_KV)
    assert run["outputs"][0] == plain
    assert run["reports"][0]["num_accepted_draft_tokens"] > 20
    record(run, "several proposers in one (a combinator)")


TREES = {
    "a proposer of its own": {"method": "everywhere:TreeWitness", "on_proposer_error": "raise"},
    "eagle3": {"model": "tiny/eagle3", "max_nodes": 12, "on_proposer_error": "raise"},
}


@pytest.mark.parametrize("name", TREES)
def test_of_trees_the_best_path_is_verified(run_engine, plain, record, name):
    run = run_engine("Configured", specdec=TREES[name], **KEEPS_KV)
    assert run["outputs"][0] == plain
    assert run["reports"][0]["num_accepted_draft_tokens"] > 20
    record(run, "drafts in trees")


def test_a_request_at_the_longest_length_costs_nobody_else_drafts(run_engine, prompts):
    """vLLM alone drafts K zeros for everybody then."""
    max_model_len = max(map(len, prompts)) + 40
    long = {"max_tokens": 200, "ignore_eos": True}
    run = run_engine("ngram", max_model_len=max_model_len, sampling=long)
    outputs, accepted = same_in_the_core(prompts, "ngram", {}, 4, max_model_len, **long)
    assert run["outputs"][0] == outputs
    assert counts(run) == accepted
    assert max(len(ids) + len(out[0]) for ids, out in zip(prompts, outputs, strict=True)) == max_model_len


def test_what_export_prints_runs(run_engine, vllm_target, plain):
    config = {"model": "tiny/medusa", "num_speculative_tokens": 2}
    run = run_engine(**hand_over("vllm", str(vllm_target), config, PluginSettings()).settings)
    assert run["outputs"][0] == plain
    assert run["reports"][0]["num_accepted_draft_tokens"] > 0


def test_reported_distributions_reach_the_verifier(run_engine, vllm_target, record):
    """The target drafts for itself: with its q every draft is accepted, without q about as many as p is peaked."""
    sampled = {"temperature": 1.0, "seed": 1}
    itself = {"model": str(vllm_target), "proposer_config": {"draft_distribution": "dense"}}
    probabilistic = {"draft_sample_method": "probabilistic"}
    run = run_engine("draft_model", specdec=itself, sampling=sampled, speculative=probabilistic, **KEEPS_KV)
    assert run["error"] is None
    assert run["reports"][0]["draft_acceptance_rate"] > 0.99
    record(run, "draft probabilities in verification")


def test_sampled_text_follows_the_targets_distribution(
    run_engine, tiny_drafter, prompts, record, two_token_distribution
):
    """Two tokens of a prompt, 1000 times: the first is sampled plainly, the second where a draft is verified."""
    num_samples, top_k, prompt = 1000, 3, prompts[1][:16]
    run = run_engine(
        "eagle3",
        k=2,
        specdec={"model": tiny_drafter("eagle3")},
        speculative={"draft_sample_method": "probabilistic"},
        batches=[[prompt]],
        sampling={"temperature": 1.0, "top_k": top_k, "n": num_samples, "max_tokens": 3, "ignore_eos": True, "seed": 7},
        **KEEPS_KV,
    )
    assert run["error"] is None
    assert 0 < run["reports"][0]["draft_acceptance_rate"] < 1
    seen = Counter((one[0], one[1]) for one in run["outputs"][0][0])
    distribution = two_token_distribution(prompt, top_k)
    assert set(seen) <= set(distribution), "a token outside the target's filter"
    chi_square = sum((seen[pair] - num_samples * p) ** 2 / (num_samples * p) for pair, p in distribution.items())
    assert chi_square < 31.8, "8 degrees of freedom: 1 in 10,000 seeds gives more"
    record(run, "sampled text follows the target's distribution")


@pytest.fixture(scope="module")
def run_with_grammar(run_engine, tmp_path_factory):
    """Sample texts under a grammar with drawn drafts. Returns the run, and its chi-square against the exact truth."""
    directory = tmp_path_factory.mktemp("five")
    target = write_target(directory / "target")
    write_target(directory / "other", seed=OTHER)

    def run(drafter, **how):
        proposer, settings = {
            "Drawn": (["Configured"], {"specdec": {"method": "adapter_proposers:Drawn", "on_proposer_error": "raise"}}),
            "draft_model": (["draft_model"], {"specdec": {"model": str(directory / "other")}}),
            "vLLM's own": ([], {}),
        }[drafter]
        if proposer:
            settings["speculative"] = PROBABILISTIC
        else:
            named = {"method": "draft_model", "model": str(directory / "other"), "num_speculative_tokens": 2}
            settings["speculative_config"] = named | PROBABILISTIC
        run = run_engine(
            *proposer,
            k=2,
            batches=[[PROMPT]],
            sampling=SAMPLING | {"n": 2000},
            model=str(directory / "target"),
            **ENGINE | KEEPS_KV | settings | how,
        )
        assert run["error"] is None
        return run, chi_square(target, run["outputs"][0][0])

    return run


@pytest.mark.parametrize("drafter", ["Drawn", "draft_model"])
def test_sampled_text_under_a_grammar_has_the_exact_distribution(run_with_grammar, record, drafter):
    """The first refused draft is verified by its probability, in the process that has the scheduler."""
    run, ratio = run_with_grammar(drafter)
    assert ratio <= 1
    assert 0 < run["reports"][0]["draft_acceptance_rate"] < 1
    assert "grammar terminated or rejected draft" not in run["log"]
    record(run, "sampled text follows the target's distribution")


def test_the_scheduler_keeps_refused_drafts_in_a_process_of_its_own(run_with_grammar):
    run, ratio = run_with_grammar("draft_model", distributed_executor_backend="mp")
    assert ratio <= 1
    assert run["reports"][0]["draft_acceptance_rate"] > 0


@pytest.mark.parametrize(("drafter", "how"), [("draft_model", {"cuts_refused": True}), ("vLLM's own", {})])
def test_drawn_drafts_that_vllm_cuts_before_refused_tokens_are_biased(run_with_grammar, drafter, how):
    """The control of the tests above. Drafters of vLLM's own are left as they are."""
    _, ratio = run_with_grammar(drafter, **how)
    assert ratio > 1


@pytest.mark.parametrize("cuts", [False, True], ids=["kept", "cut"])
def test_sampled_text_of_a_head_under_a_grammar_has_the_exact_distribution(
    run_engine, model, prompts, tokenizer, tiny_drafter, cuts
):
    """Two tokens of a prompt; as the second the head mostly drafts what the grammar refuses. To cut there is biased."""
    num_samples, prompt = 6000, prompts[0][:16]
    pairs = likely_pairs(model, prompt, 8 / num_samples, Grammar(tokenizer, REFUSING))
    asked = {"temperature": TEMPERATURE, "structured_outputs": {"regex": REFUSING}}
    run = run_engine(
        "eagle3",
        k=2,
        specdec={"model": tiny_drafter("eagle3")},
        speculative=PROBABILISTIC,
        batches=[[prompt]],
        sampling=asked | {"n": num_samples, "max_tokens": 3, "ignore_eos": True, "seed": 7},
        max_num_seqs=64,
        cuts_refused=cuts,
        **KEEPS_KV,
    )
    assert run["error"] is None
    deviate = chi_square_of_pairs(Counter((one[0], one[1]) for one in run["outputs"][0][0]), num_samples, pairs)
    assert (deviate > 3.7) == cuts, deviate


@pytest.fixture(scope="module")
def plain_calls(run_engine):
    """What vLLM generates greedily under grammars without speculation."""
    run = run_engine(sampling=SAMPLING_OF_CALLS)
    assert run["error"] is None
    return run["outputs"][0]


@pytest.mark.parametrize(
    ("proposer", "how"),
    [(None, {}), (None, {"distributed_executor_backend": "mp"}), ("ForcedThenLookUp", {}), ("ForcedThenHead", {})],
)
def test_forced_text_is_drafted_as_in_the_core(run_engine, plain_calls, prompts, record, tiny_drafter, proposer, how):
    """Requests with and without a grammar run side by side. A worker in another process is told what each asks for."""
    specdec = {"method": "forced"} if proposer is None else {"method": f"adapter_proposers:{proposer}"}
    specdec |= {"model": tiny_drafter("eagle3")} if proposer == "ForcedThenHead" else {}
    run = run_engine("Configured", k=8, specdec=specdec, sampling=SAMPLING_OF_CALLS, **KEEPS_KV | how)
    assert run["error"] is None
    assert run["outputs"][0] == plain_calls
    outputs, acceptance = in_the_core(prompts, specdec | {"num_speculative_tokens": 8})
    assert outputs == plain_calls
    assert run["reports"][0]["errors"] == {}
    assert counts(run)["num_accepted_draft_tokens"] == acceptance.num_accepted_tokens > 20
    assert "not told of this grammar" not in run["log"]
    if proposer is None:
        assert counts(run) == {name: acceptance.as_dict()[name] for name in DRAFTED}
    record(run, "grammars of requests")


def test_a_grammar_that_vllm_compiles_with_another_library_is_said_and_not_followed(run_engine, prompts):
    even = {"structured_outputs": {"json": {"type": "integer", "multipleOf": 2}}, "max_tokens": 8}
    run = run_engine("forced", batches=[prompts[:1]], sampling=even)
    assert run["error"] is None
    assert 'vLLM compiles a grammar with "guidance"; workers do not' in run["log"]
    assert "the proposer is not told of this grammar" in run["log"]
    assert counts(run)["num_draft_tokens"] == 0


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_two_tensor_parallel_workers_each_run_the_proposer_and_generate_what_one_does(
    run_engine, plain, record, tiny_drafter, method
):
    specdec = {"model": tiny_drafter(method)} if method == "eagle3" else {}
    run = run_engine(method, specdec=specdec, tensor_parallel_size=2, **KEEPS_KV)
    assert run["outputs"][0] == plain
    first, second = run["reports"]
    assert first["pid"] != second["pid"]
    assert first["propose_calls"] == second["propose_calls"] > 0
    assert counts(run) == {name: second[name] for name in DRAFTED}
    record(run, "two tensor-parallel workers")


EAGLE3 = {"method": "eagle3", "model": str(packaged("tiny/eagle3"))}
REFUSED = {
    "asynchronous scheduling": (EAGLE3, {"async_scheduling": True}, "async scheduling is only supported with"),
    "pipeline parallelism": (
        EAGLE3,
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
        "the last stage",
    ),
    "a draft network beside a prefix cache": (EAGLE3, {"enable_prefix_caching": True}, "prefix cache skips positions"),
    "the target's keys and values": ({"method": "everywhere:CacheReader"}, {}, "vLLM's cache is laid out"),
    "the target's own layers": (
        {"method": "specdec.plugins.layer_skip.proposer:LayerSkipProposer", "proposer_config": {"exit_layer": 6}},
        {},
        "its layers run over that",
    ),
}


@pytest.mark.parametrize("capability", REFUSED)
def test_what_cannot_survive_is_refused_at_start_with_the_reason(run_engine, record, capability):
    proposer, engine, reason = REFUSED[capability]
    run = run_engine("Configured", specdec=proposer, **engine)
    assert run["outputs"] == []
    line = rf"(?:.*(?:\breason {{2,}}|error, ))?(.*{re.escape(reason)}.*?)(?: \[type=.*)?$"
    said = re.search(line, run["error"] + run["log"], flags=re.IGNORECASE | re.MULTILINE)
    assert said, "vLLM's own words for the first, ours otherwise"
    record(run, capability, refused=said[1])


def test_a_name_that_nobody_offers_stops_the_start_with_our_error(run_engine):
    assert "SD-E101" in run_engine("ngrm")["error"]
