"""Classes written for vLLM and for transformers, in our engine."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from foreign_classes import Lookup, Misuse, Repeat, Tensor
from inside import info_of
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from typer.testing import CliRunner

from specdec import LLM, SamplingParams
from specdec.adapters.foreign.candidate_generator import CandidateGenerator as GENERATORS
from specdec.adapters.foreign.recognise import adapt_proposer, is_candidate_generator, is_vllm_class
from specdec.cli._app import build_app
from specdec.sdk import HostProposer, Needs, Phase, ProposerConfig, ProposerError, Refusal
from specdec.sdk.errors import PluginLoadError, SpecdecWarning
from specdec.testing import check_proposer
from specdec.testing.fakes import FakeServices, fake_target_info, step_view

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPT_LOOKUP = "transformers.generation.candidate_generator.PromptLookupCandidateGenerator"


def texts(ids, **settings):
    llm = LLM("tiny", device="cpu", **settings)
    outputs = llm.generate([{"prompt_token_ids": each[0].tolist()} for each in ids], GREEDY)
    return [output.outputs[0].token_ids for output in outputs], llm.engine.metrics.acceptance


@pytest.fixture(scope="module")
def truth(prompts):
    return texts(prompts)[0]


def drafting(path, k=3, **others):
    return {"model": path, "num_speculative_tokens": k} | others


@pytest.mark.parametrize(
    "config",
    [
        drafting("foreign_classes.Lookup"),
        drafting("foreign_classes.Tensor"),
        drafting(PROMPT_LOOKUP),
        drafting(PROMPT_LOOKUP, proposer_config={"num_output_tokens": 8, "max_matching_ngram_size": 3}),
    ],
    ids=["vllm", "vllm tensor", "prompt lookup", "prompt lookup with options"],
)
def test_greedy_text_does_not_change_and_drafts_are_accepted(prompts, truth, config):
    found, acceptance = texts(prompts, speculative_config=config)
    assert found == truth
    assert acceptance.num_accepted_tokens > 0


def test_a_vllm_class_is_shown_each_batch_row_as_vllm_shows_it(prompts, truth):
    texts(prompts, speculative_config=drafting("foreign_classes.Lookup"), max_num_batched_tokens=16)
    whole = [ids[0].tolist() + list(text) for ids, text in zip(prompts, truth, strict=True)]
    calls = Lookup.newest.calls
    assert any(not sampled for sampled, _ in calls), "a prompt that is not computed yet has no new token"
    for sampled, text in calls:
        assert text[len(text) - len(sampled) :] == sampled
        assert any(each[: len(text)] == text for each in whole)
    for prompt, text in zip(prompts, truth, strict=True):
        prefix = prompt[0].tolist()
        committed = [token for sampled, shown in calls if shown[: len(prefix)] == prefix for token in sampled]
        assert list(text)[: len(committed)] == committed
    assert max(len(sampled) for sampled, _ in calls) > 1, "accepted drafts are new tokens too"


@pytest.mark.parametrize("how", ["longer than K", "ndarray rows", "numpy scalars", "padding inside", "too few rows"])
def test_what_vllm_lets_stand_is_cut_to_a_draft(prompts, truth, how):
    config = drafting("foreign_classes.Misuse", proposer_config={"how": how})
    assert texts(prompts, speculative_config=config)[0] == truth


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("beyond the vocabulary", "SD-E203"),
        ("nothing", "got NoneType"),
        ("raises", "out of ideas"),
        ("too many rows", "3 rows for 2 requests"),
    ],
)
def test_what_kills_vllm_is_contained(prompts, truth, how, told):
    config = drafting("foreign_classes.Misuse", proposer_config={"how": how})
    with pytest.raises(ProposerError) as raised:
        texts(prompts, speculative_config=config)
    assert told in str(raised.value)
    assert texts(prompts, speculative_config=config | {"on_proposer_error": "skip_step"})[0] == truth


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("WantsTheModel", "target_model.model does not exist outside vLLM"),
        ("WantsParallelism", "vllm_config.parallel_config.rank does not exist outside vLLM"),
    ],
)
def test_what_only_vllm_has_is_refused_by_name_at_start(name, told):
    with pytest.raises(ProposerError) as raised:
        LLM("tiny", device="cpu", speculative_config=drafting(f"foreign_classes.{name}"))
    assert told in str(raised.value)


def test_a_generator_serves_one_request_and_is_told_what_was_right(prompts, truth):
    Repeat.made.clear()
    config = drafting("foreign_classes.Repeat", proposer_config={"times": 2})
    llm = LLM("tiny", device="cpu", speculative_config=config)
    outputs = llm.generate([{"prompt_token_ids": ids[0].tolist()} for ids in prompts], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == truth
    assert len(Repeat.made) == len(prompts)
    for each, prompt, output in zip(Repeat.made, prompts, outputs, strict=True):
        assert each.vocab_size == info_of(llm).vocab_size
        lengths = [length for length, _, _ in each.updates]
        num_right = [num_matches for _, _, num_matches in each.updates]
        assert num_right == [after - before - 1 for before, after in pairwise([prompt.shape[1] + 1, *lengths])]
        assert lengths[-1] < prompt.shape[1] + len(output.outputs[0].token_ids), "the last step ends the request"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("foreign_classes.WantsOutputs", "requires_model_outputs"),
        ("foreign_classes.Repeat", "is constructed with times"),
        ("transformers.generation.candidate_generator.AssistedCandidateGenerator", "assistant_model"),
    ],
)
def test_a_generator_that_cannot_run_here_is_refused_before_weights_load(path, told):
    with pytest.raises(Refusal) as raised:
        LLM("tiny", device="cpu", speculative_config=drafting(path))
    assert told in str(raised.value)


class Ours(HostProposer):
    def draft(self, request, tokens, k):
        return ()


class Neither:
    def propose(self, one, two): ...


def test_classes_are_known_by_their_signatures_not_by_their_bases():
    assert is_vllm_class(Lookup)
    assert is_vllm_class(Misuse)
    assert is_vllm_class(Tensor)
    assert is_candidate_generator(PromptLookupCandidateGenerator)
    assert is_candidate_generator(AssistedCandidateGenerator)
    for other in (Ours, Neither, PromptLookupCandidateGenerator):
        assert not is_vllm_class(other)
    for other in (Ours, Neither, Lookup):
        assert not is_candidate_generator(other)


def test_a_class_of_neither_engine_gets_the_usual_error():
    with pytest.raises(PluginLoadError, match="SD-E111"):
        LLM("tiny", device="cpu", speculative_config=drafting("test_foreign.Neither"))


@pytest.mark.parametrize("path", ["foreign_classes.Lookup", PROMPT_LOOKUP])
def test_what_such_a_class_lacks_is_said_at_load_and_by_info(path, caplog):
    caplog.set_level(logging.WARNING, "specdec")
    LLM("tiny", device="cpu", speculative_config=drafting(path))
    (said,) = [record.getMessage() for record in caplog.records if "It lacks here" in record.getMessage()]
    done = CliRunner().invoke(build_app(), ["info", path, "--json"])
    assert done.exit_code == 0, done.output
    lacks = said.partition("It lacks here: ")[2]
    assert lacks in json.loads(done.stdout)["summary"]


@pytest.mark.parametrize(
    ("proposer", "config"),
    [
        (Lookup, {}),
        (PromptLookupCandidateGenerator, {}),
        (Repeat, {"proposer_config": {"times": 2}}),
    ],
    ids=["vllm", "prompt lookup", "generator"],
)
def test_the_conformance_kits_basic_level_passes(proposer, config):
    results = check_proposer(proposer, config, level="basic")
    assert [result.text for result in results if not result.ok] == []
    assert sum(result.status == "passed" for result in results) > 3


class Both(PromptLookupCandidateGenerator):
    def propose(self, step): ...


@pytest.mark.parametrize("candidate", [Both, int], ids=["it proposes", "it drafts nothing"])
def test_a_generator_has_candidates_and_no_proposals(candidate):
    assert not is_candidate_generator(candidate)


def test_a_generator_is_asked_within_the_budget_and_told_of_drafts_that_were_verified():
    target, repeat = fake_target_info(vocab_size=64), GENERATORS.around(Repeat)
    config = ProposerConfig(num_draft_tokens=3, options=repeat.Options(times=4))
    assert repeat.needs(config, target) == Needs(history=True, state="per_request")
    Repeat.made.clear()
    proposer = repeat(config)
    proposer.bind(target, FakeServices())
    step = replace(step_view([[1, 2, 3], [4, 5]], 3), budget=torch.tensor([2, 0]), num_accepted=torch.tensor([1, 0]))
    step = replace(step, phase=torch.tensor([Phase.DECODE, Phase.PREFILL_DONE], dtype=step.phase.dtype))
    for name in step.request_ids:
        proposer.on_start(SimpleNamespace(request_id=name))
    proposer.observe(step)
    assert [(each.times, each.vocab_size, each.updates) for each in Repeat.made] == [
        (4, 64, [(3, None, 1)]),
        (4, 64, []),
    ]
    draft = proposer.propose(step)
    assert (draft.lengths.tolist(), draft.token_ids[0, :2].tolist()) == ([2, 0], [3, 3])
    with pytest.raises(Refusal, match="is constructed with times"):
        repeat.needs(ProposerConfig(num_draft_tokens=3), target)


@pytest.mark.parametrize(("name", "here"), [("load_model", "bind(target, services)"), ("get_candidates", "propose")])
def test_a_method_that_only_other_engines_call_is_a_warning(name, here):
    ours = type("Mine", (HostProposer,), {"draft": lambda self, view: [], name: lambda self, *arguments: None})
    with pytest.warns(SpecdecWarning, match=f"{name} .*is never called by the engine: another engine's word") as told:
        assert adapt_proposer(ours) is None
    assert len(told) == 1
    assert here in str(told[0].message)


def test_a_method_that_the_class_calls_itself_is_a_helper_of_its_own(recwarn):
    class Mine(HostProposer):
        def draft(self, view):
            return self.get_candidates(view)

        def get_candidates(self, view):
            return []

    assert adapt_proposer(Mine) is None
    assert not recwarn
