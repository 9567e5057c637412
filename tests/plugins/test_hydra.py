"""Hydra: heads in a row draft what the format says, whatever was accepted, rejected or preempted before."""

from __future__ import annotations

from pathlib import Path

import facts
import pytest
import torch
from hydra_checkpoints import NUM_HEADS, H, Hydra, hydra
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_text import PlainText
from replaying import ROOMS, tiny_truth

from specdec.plugins.hydra.recognise import is_hydra
from specdec.sdk import SpecdecError
from specdec.sdk.checkpoint import Checkpoint

pytestmark = pytest.mark.slow

METHOD = "specdec.plugins.hydra.proposer:HydraProposer"


@pytest.fixture(scope="module")
def heads(target) -> Hydra:
    return hydra(target, tiny_truth()[3:9])


@pytest.fixture(scope="module")
def directory(heads, tmp_path_factory) -> Path:
    return heads.save(tmp_path_factory.mktemp("hydra") / "draft")


engine = facts.engines_of(METHOD)


@pytest.fixture(scope="module")
def start(directory):
    return lambda k, **others: engine(directory, min(k, NUM_HEADS), **others)


@pytest.mark.parametrize("k", [1, NUM_HEADS])
def test_drafts_and_accepted_counts_are_those_of_a_replay(k, directory, heads, target):
    accepted = facts.replayed(engine(directory, k), heads.draft(target), 5, k, every=2)
    assert accepted > 0, "agreement on drafts that are all rejected would show little"


@pytest.mark.parametrize("room", ["scarce", *(pytest.param(room, marks=pytest.mark.full) for room in ROOMS)])
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(room, directory, heads, target):
    llm = engine(directory, NUM_HEADS, method="hydra_checkpoints:ForcedHydra", **(ROOMS["chunked"] | ROOMS[room]))

    @settings(max_examples=2, deadline=None, derandomize=True, database=None)
    @given(pattern=st.lists(st.integers(0, NUM_HEADS), min_size=2, max_size=7))
    def holds(pattern):
        facts.assert_drafts_of_a_fresh_prefill(llm, pattern, heads.draft(target))

    holds()


def test_device_form_of_a_step_gives_the_same_drafts(directory):
    names = ("hydra_checkpoints:ForcedHydra", "hydra_checkpoints:ForcedInDeviceForm")
    engines = (engine(directory, NUM_HEADS, method=name, max_num_batched_tokens=64) for name in names)
    facts.assert_same_drafts(engines, (3, 0, 2, 1), slice(2, 3))


@pytest.mark.parametrize(("distribution", "scale"), [("sparse", 1.0), ("dense", 0.5)])
def test_reported_distribution_is_the_distribution_drawn_from(distribution, scale, heads, target, tmp_path):
    """A logit scale that the checkpoint states is applied."""
    directory = Hydra(heads.config | {"logit_scale": scale}, heads.tensors).save(tmp_path / "draft")
    llm = engine(directory, 3, method="hydra_checkpoints:RecordingHydra", speculative=facts.probabilistic(distribution))
    facts.assert_drawn_from(llm, lambda text, count, drawn: scale * heads.rollout(text, count, target, drawn)[1])


def test_text_is_that_of_plain_decoding_in_chunks_and_with_preemption(start):
    facts.assert_plain_text_in_chunks_and_with_preemption(lambda **room: start(NUM_HEADS, **room))


@pytest.mark.full
class TestText(PlainText):
    """With drafts it is that of plain decoding."""


def test_heads_are_recognised_by_their_configuration(directory):
    assert is_hydra(Checkpoint.open(directory))


def changed(heads: Hydra, tensors: dict | None = None, **config) -> Hydra:
    kept = {name: each for name, each in (heads.tensors | (tensors or {})).items() if each is not None}
    return Hydra({key: value for key, value in (heads.config | config).items() if value is not None}, kept)


REFUSED = {
    "heads without a prefix": (lambda h: changed(h, hydra_head_arch="mlp"), 3, "hydra_head_arch: 'mlp'"),
    "heads that read no tokens": (lambda h: changed(h, grounded_heads=False), 3, "grounded_heads: False"),
    "no number of heads": (lambda h: changed(h, hydra_num_heads=None), 3, "SD-E170.*hydra_num_heads"),
    "more drafts than heads": (lambda h: h, 4, "num_speculative_tokens is 4, .* drafts at most 3"),
    "another vocabulary": (
        lambda h: changed(h, {"hydra_lm_head.0.1.weight": torch.zeros(9, H)}), 3, "vocabulary is 9, .* is 4096",
    ),
    "no head": (lambda h: changed(h, {"hydra_lm_head.0.1.weight": None}), 3, r"SD-E172.*hydra_lm_head\.0"),
    "a missing tensor": (lambda h: changed(h, {"hydra_mlp.1.1.linear.bias": None}), 3, "SD-E172.*blocks.1.0.linear"),
    "an unknown tensor": (lambda h: changed(h, {"gate.weight": torch.ones(2)}), 3, "SD-E174.*gate.weight"),
    "other widths": (
        lambda h: changed(h, {"hydra_mlp.0.1.linear.weight": torch.ones(H, H)}), 3, "SD-E175.*blocks.0.0.linear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name, heads, tmp_path):
    change, k, message = REFUSED[name]
    with pytest.raises(SpecdecError, match=f"(?s){message}"):
        engine(change(heads).save(tmp_path / "draft"), k)
