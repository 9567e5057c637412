"""Draft models that draft in parallel: PARD drafts what its format says, PARD-2 with the target's hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import facts
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import plugin_of, proposer_of
from pard_checkpoints import MASK_ID, H, Made, N, Replay, V, older_pard2, padded, pard, pard2
from plain_text import PlainText
from replaying import ROOMS, continued, speculate, tiny_prompts, tiny_truth

from specdec import LLM, SamplingParams
from specdec.sdk import SpecdecError

pytestmark = pytest.mark.slow

MAKERS = (pard, padded, pard2, older_pard2)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """PARD-2, which has all that PARD has."""
    return pard2(tmp_path_factory.mktemp("pard2") / "draft").save()


@pytest.fixture(scope="module")
def start(made) -> Callable[..., LLM]:
    return partial(engine, made)


def engine(made: Made, k: int, *, method: str | None = None, speculative: dict | None = None, **others) -> LLM:
    """Without a `method` the checkpoint says itself which proposer it is for."""
    if method is not None:
        return speculate("tiny", method, k, speculative={"model": str(made.path)} | (speculative or {}), **others)
    config = {"model": str(made.path), "num_speculative_tokens": k} | (speculative or {})
    return LLM("tiny", speculative_config=config, **({"max_model_len": 256} | others))


def cut(replay: Replay, k: int) -> Callable[[list[int], int], list[int]]:
    """A draft is made for K rows, and cut where the text ends."""
    return lambda committed, count: replay.draft(committed, k)[:count]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_drafts_and_accepted_counts_of_every_layout_are_those_of_a_replay(make, target, tmp_path):
    made = make(tmp_path / "draft").save()
    llm = engine(made, 4)
    assert plugin_of(llm).name == "draft_model"
    assert facts.replayed(llm, cut(Replay(made, target), 4), 5, 4, every=2) > 0, (
        "agreement on drafts that are all rejected would show little"
    )


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_shortest_and_the_longest_drafts_of_every_layout_are_those_of_a_replay(make, k, target, tmp_path):
    made = make(tmp_path / "draft").save()
    llm = engine(made, k)
    for index in (0, 6, 15):
        facts.replayed(llm, cut(Replay(made, target), k), index, k, every=2)


def test_the_first_draft_of_pard_is_the_models_own_next_token(tmp_path):
    made = pard(tmp_path / "draft").save()
    firsts = []
    for speculative in ({}, {"parallel_drafting": False}):
        llm = facts.told(engine(made, 3, method="pard_checkpoints:ForcedPard", speculative=speculative), (2, 0, 3))
        continued(llm, tiny_prompts()[2:4])
        firsts.append({committed: draft[0] for committed, draft in proposer_of(llm).drafts.items()})
    assert firsts[0] == firsts[1]
    assert len(firsts[0]) > 15


@pytest.mark.parametrize("speculative", [{}, {"max_nodes": 12}], ids=["chain", "tree"])
def test_all_drafts_come_from_one_pass_over_the_mask(speculative, tmp_path):
    widths: list[int] = []
    llm = engine(pard(tmp_path / "draft").save(), 5, speculative=speculative)
    first = proposer_of(llm)._model.get_decoder().layers[0]
    first.register_forward_hook(lambda _, args, out: widths.append(out.shape[1]))
    continued(llm, tiny_prompts()[4:5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert widths[0] == len(tiny_prompts()[4]) + 1  # the prompt and the newest token
    assert widths[1:] == []  # one token is left: its draft is the newest token's own
    continued(llm, tiny_prompts()[4:5], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert widths[2] == 4


def test_text_is_that_of_plain_decoding_in_chunks_and_with_preemption(start):
    facts.assert_plain_text_in_chunks_and_with_preemption(lambda **room: start(5, **room))


@pytest.mark.full
class TestText(PlainText):
    """With drafts it is that of plain decoding."""


@pytest.fixture(scope="module", params=["scarce", *(pytest.param(r, marks=pytest.mark.full) for r in ROOMS)])
def forced(request, made) -> LLM:
    rooms = ROOMS["chunked"] | ROOMS[request.param]
    # The target's states of a shared prefix are not computed anew, and the first draft behind it may be another.
    return engine(made, 5, method="pard_checkpoints:ForcedPard", enable_prefix_caching=False, **rooms)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(pattern=st.lists(st.integers(0, 5), min_size=2, max_size=7))
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(pattern, forced, made, target):
    """The target's states before a chunk, a rejection or a preemption are those that its row was left with."""
    facts.assert_drafts_of_a_fresh_prefill(forced, pattern, cut(Replay(made, target), 5), every=8)
    assert (forced.engine.metrics.counts["num_preemptions"] > 0) == (forced.engine.config.num_kv_blocks is not None)


def test_device_form_of_a_step_gives_the_same_drafts(made):
    names = ("pard_checkpoints:ForcedPard", "pard_checkpoints:ForcedInDeviceForm")
    facts.assert_same_drafts((engine(made, 5, method=name, max_num_batched_tokens=64) for name in names), (3, 0, 5, 1))


@pytest.mark.parametrize("distribution", ["sparse", "dense"])
def test_reported_distributions_are_those_drawn_from_and_do_not_depend_on_drafts(distribution, made, target):
    llm = engine(made, 3, method="pard_checkpoints:RecordingPard", speculative=facts.probabilistic(distribution))
    facts.assert_drawn_from(llm, lambda text, count, drawn: Replay(made, target).logits(text, 3))


def test_every_trap_of_pard2_changes_what_is_drafted(made, target):
    """The order of the layers, the norm of the last, the row of the first token: the replay above tells them apart."""
    committed = tiny_truth()[3][:40]
    right = Replay(made, target).logits(committed, 4)
    variants = {features: Made(**vars(made) | {"features": features}) for features in ((3, "final"), (N, 3))}
    others = [Replay(each, target).logits(committed, 4) for each in variants.values()]
    others.append(Replay(made, target).logits(committed, 4, shifted=True))
    assert all(float((other - right).abs().max()) > 0.1 for other in others)


def test_pard_in_a_dtype_or_quantization_of_its_own_gives_the_plain_text(made):
    for changes in ({"dtype": "bfloat16"}, {"quantization": "int8_weight_only"}):
        assert continued(engine(made, 3, speculative=changes), tiny_prompts()[:2]) == tiny_truth()[:2]


def without(made: Made, *keys: str) -> Made:
    made.config = {key: value for key, value in made.config.items() if key not in keys}
    return made


def changed(made: Made, **config) -> Made:
    made.config |= config
    return made


def unprojected(made: Made) -> Made:
    made.projection = {}
    return made


def narrower(made: Made) -> Made:
    made.projection["target_proj.weight"] = made.projection["target_proj.weight"][:, :-1].contiguous()
    return made


def with_more(made: Made) -> Made:
    made.projection["gate.weight"] = torch.ones(2, 2)
    return made


REFUSED = {
    "asked for without a mask": (pard, lambda m: without(m, "pard_token"), True, "no pard_token"),
    "a mask outside of the table": (pard, lambda m: changed(m, pard_token=V), None, f"mask token {V} has no row"),
    "a negative mask": (pard, lambda m: changed(m, pard_token=-1), None, "mask token -1 has no row"),
    "a mask that is no number": (pard, lambda m: changed(m, pard_token="<mask>"), None, "SD-E171"),
    "PARD-2 one by one": (pard2, lambda m: m, False, "drafts in parallel only"),
    "PARD-2 without a mask": (pard2, lambda m: without(m, "pard_token"), None, "drafts in parallel only"),
    "no layers": (pard2, lambda m: without(m, "pard2_target_layers"), None, "no 'pard2_target_layers'"),
    "a layer the target lacks": (pard2, lambda m: changed(m, pard2_target_layers=[N + 1, 3]), None, "among 0 .. 8"),
    "a layer from the end": (pard2, lambda m: changed(m, pard2_target_layers=[-1, 3]), None, "among 0 .. 8"),
    "another width": (pard2, lambda m: changed(m, pard2_target_dim=H), None, "256 features.* have 512"),
    "no projection": (pard2, unprojected, None, "SD-E146.*warp_model.bin"),
    "a projection of another shape": (pard2, narrower, None, "SD-E175.*511"),
    "unknown tensors beside it": (pard2, with_more, None, "SD-E174.*gate.weight"),
    "a projection nobody mentions": (pard2, lambda m: changed(m, pard2=False), None, "does not say that it is one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_as_trained_is_refused_by_name(name, tmp_path):
    make, change, asked, message = REFUSED[name]
    made = change(make(tmp_path / "draft"))
    with pytest.raises(SpecdecError, match=f"(?s){message}"):
        engine(made.save(), 3, method="draft_model", speculative={} if asked is None else {"parallel_drafting": asked})


def test_vllms_other_name_of_the_mask_is_read_too(tmp_path):
    made = without(pard(tmp_path / "draft", ptd_token_id=MASK_ID), "pard_token").save()
    assert json.loads((made.path / "config.json").read_text()).get("pard_token") is None
    assert proposer_of(engine(made, 3)).mask_token_id == MASK_ID


def test_a_mask_is_no_reason_to_draft_in_parallel_where_the_user_says_not_to(tmp_path):
    llm = engine(pard(tmp_path / "draft").save(), 3, speculative={"parallel_drafting": False})
    assert proposer_of(llm).mask_token_id is None
