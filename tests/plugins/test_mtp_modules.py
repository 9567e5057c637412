"""Several multi-token-prediction modules: each drafts the token at its own depth, after any history."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import facts
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import proposer_of
from mtp_checkpoints import ERNIE, MIMO, NEXTN, Module, Several, fitted_module, tiny_module, tiny_target
from plain_text import PlainText
from replaying import ROOMS, continued, speculate, tiny_prompts, tiny_truth

from specdec import LLM, SamplingParams
from specdec.sdk import Refusal

pytestmark = pytest.mark.slow

N, COUNT = 8, 4


def modules_like(make, **how) -> Several:
    return Several([make(seed=seed, **how) for seed in range(COUNT)])


@pytest.fixture(scope="module")
def modules(target) -> Several:
    """The first is fitted, so that its drafts are accepted and rejected."""
    return Several([fitted_module(target, tiny_truth()[3:9]), *[tiny_module(seed=seed) for seed in range(1, COUNT)]])


@pytest.fixture(scope="module")
def directory(modules, tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("mtp") / "target", modules.tensors(NEXTN, N))


def engine(directory: Path, k: int, *, method: str = "mtp", **others) -> LLM:
    return speculate(directory, method, k, **others)


@pytest.fixture(scope="module")
def start(directory):
    return lambda k, **others: engine(directory, min(k, COUNT), **others)


def block_recycling(seed: int) -> Module:
    """Without a final norm, as in Ernie's layout."""
    module = tiny_module(seed, recycles_normed=False)
    del module.parts["norm"]
    return module


LAYOUTS = {
    "deepseek": (NEXTN, N, tiny_module),
    "mimo": (MIMO, 0, partial(tiny_module, hidden_first=True)),
    "ernie": (ERNIE, 0, block_recycling),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_of_every_layout_are_those_of_a_replay(name, target, tmp_path):
    layout, first, make = LAYOUTS[name]
    modules = modules_like(make)
    path = tiny_target(tmp_path / "target", modules.tensors(layout, first))
    facts.replayed(engine(path, COUNT), modules.draft(target), 1, COUNT, every=4)


@pytest.mark.parametrize("k", [1, 2, 3, COUNT])
def test_drafts_and_accepted_counts_are_those_of_a_replay(k, directory, modules, target):
    accepted = facts.replayed(engine(directory, k), modules.draft(target), 5, k, every=2)
    assert accepted > 0, "agreement on drafts that are all rejected would show little"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_prompt_shorter_than_the_modules_are_deep_is_drafted_for_as_by_a_replay(length, directory, modules, target):
    """A deep module has no row for the first tokens of a text."""
    prompt = tiny_prompts()[5][:length]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = engine(directory, COUNT, method="mtp_checkpoints:RecordingMtp")
    (text,) = continued(llm, [prompt], params)
    steps = [(length, draft) for length, draft in proposer_of(llm).steps if int(draft.lengths[0])]
    assert steps[0][0] == length + 1
    for committed, draft in steps:
        count = int(draft.lengths[0])
        assert draft.token_ids[0, :count].tolist() == modules.draft(target)(text[:committed], count)


def test_every_module_matters_and_reads_what_the_one_before_it_made(modules, target):
    """The replay above tells apart: recycled states, a module run twice, tokens that are not shifted."""
    committed = tiny_truth()[5][:40]
    right = modules.rollout(committed, COUNT, target)[1]
    swapped = Several([*modules.modules[:2], modules.modules[3], modules.modules[2]])
    raw = Several([Module(**vars(each) | {"recycles_normed": False}) for each in modules.modules])
    alone = modules.modules[0].rollout(committed, COUNT, target)[1]
    for other in (swapped.rollout(committed, COUNT, target)[1], raw.rollout(committed, COUNT, target)[1], alone):
        assert float((other - right)[2:].abs().max()) > 0.1


@pytest.fixture(scope="module", params=["scarce", *(pytest.param(r, marks=pytest.mark.full) for r in ROOMS)])
def forced(request, directory) -> LLM:
    return engine(directory, COUNT, method="mtp_checkpoints:ForcedMtp", **(ROOMS["chunked"] | ROOMS[request.param]))


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(pattern=st.lists(st.integers(0, COUNT), min_size=1, max_size=7))
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(pattern, forced, modules, target):
    """Rows that read rejected drafts are run again, though the positions that they lie at were accepted earlier."""
    facts.assert_drafts_of_a_fresh_prefill(forced, pattern, modules.draft(target))
    assert (forced.engine.metrics.counts["num_preemptions"] > 0) == (forced.engine.config.num_kv_blocks is not None)


def test_device_form_of_a_step_gives_the_same_drafts(directory):
    names = ("mtp_checkpoints:ForcedMtp", "mtp_checkpoints:ForcedInDeviceForm")
    engines = (engine(directory, COUNT, method=name, max_num_batched_tokens=64) for name in names)
    facts.assert_same_drafts(engines, (3, 0, 4, 1))


@pytest.mark.parametrize("distribution", ["sparse", "dense"])
def test_reported_distribution_is_the_distribution_drawn_from(distribution, directory, modules, target):
    llm = engine(directory, 3, method="mtp_checkpoints:RecordingMtp", speculative=facts.probabilistic(distribution))
    facts.assert_drawn_from(llm, lambda text, count, drawn: modules.rollout(text, count, target, drawn)[1])


def test_text_is_that_of_plain_decoding_in_chunks_and_with_preemption(start):
    facts.assert_plain_text_in_chunks_and_with_preemption(lambda **room: start(COUNT, **room))


@pytest.mark.full
class TestText(PlainText):
    """With drafts it is that of plain decoding."""


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        (COUNT + 1, {}, "num_speculative_tokens is 5, and each of 4 modules drafts one token"),
        (3, {"num_modules": 2}, "num_speculative_tokens is 3, and each of 2 modules drafts one token"),
        (3, {"num_modules": 5}, "num_modules is 5, and .* has 4 that can draft"),
    ],
)
def test_more_drafts_or_modules_than_there_are_are_refused_with_both_numbers(k, options, message, directory):
    with pytest.raises(Refusal, match=message):
        engine(directory, k, speculative={"proposer_config": options})


def test_a_module_that_lacks_a_tensor_is_named_by_its_own_name(modules, tmp_path):
    tensors = modules.tensors(NEXTN, N)
    del tensors[f"model.layers.{N + 2}.hnorm.weight"]
    path = tiny_target(tmp_path / "target", tensors)
    with pytest.raises(Exception, match=r"(?s)SD-E172.*hidden_norm\.weight"):
        engine(path, COUNT)


def test_new_weights_reach_every_module(directory):
    new = modules_like(lambda seed: tiny_module(seed + COUNT)).tensors(NEXTN, N)
    llm = engine(directory, COUNT)
    llm.update_proposer_weights(new)
    for depth, module in enumerate(proposer_of(llm)._modules._modules):
        assert torch.equal(module.projection.weight, new[f"model.layers.{N + depth}.eh_proj.weight"])


@pytest.mark.parametrize(("options", "shares"), [({}, False), ({"num_modules": 1}, True)])
def test_several_modules_share_no_prefix_because_rows_read_tokens_far_behind_them(options, shares, directory):
    llm = engine(directory, COUNT, speculative={"proposer_config": options})
    assert llm.engine.prefix_caching.enabled == shares
