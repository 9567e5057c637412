"""MLP speculators: stages in a row draft what the format says, tied or apart, after any history."""

from __future__ import annotations

from pathlib import Path

import facts
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import proposer_of
from mlp_checkpoints import NUM_STAGES, WIDTH, H, Mlp, V, mlp
from plain_text import PlainText
from replaying import ROOMS, tiny_truth
from sweeps import slow_unless

from specdec.plugins.mlp_speculator.recognise import is_mlp_speculator
from specdec.sdk import SpecdecError
from specdec.sdk.checkpoint import Checkpoint

METHOD = "specdec.plugins.mlp_speculator.proposer:MlpSpeculatorProposer"


@pytest.fixture(scope="module")
def made(target) -> Mlp:
    return mlp(target, tiny_truth()[4:7])


@pytest.fixture(scope="module")
def directory(made, tmp_path_factory) -> Path:
    return made.save(tmp_path_factory.mktemp("mlp") / "draft")


engine = facts.engines_of(METHOD)


@pytest.fixture(scope="module")
def start(directory):
    return lambda k, **others: engine(directory, min(k, NUM_STAGES), **others)


@pytest.mark.parametrize("k", [1, NUM_STAGES])
def test_drafts_and_accepted_counts_are_those_of_a_replay(k, directory, made, target):
    accepted = facts.replayed(engine(directory, k), made.draft(target), 5, k, every=2)
    assert accepted > 0, "agreement on drafts that are all rejected would show little"


def with_one_head(made: Mlp) -> Mlp:
    return made.changed({f"head.{stage}.weight": None for stage in range(1, NUM_STAGES)})


def with_copies(made: Mlp) -> Mlp:
    """Every stage is stored, and those behind the first repeat it."""
    repeated = {f"{name}.2.weight": made.part(f"{name}.weight", 2) for name in ("emb", "proj", "ln")}
    return made.changed(repeated | {f"ln.{stage}.bias": made.part("ln.bias", 0) for stage in (1, 2)})


def without_prefix(made: Mlp) -> Mlp:
    return Mlp(made.config, made.tensors, prefix="")


LAYOUTS = {
    "scaled": (lambda made: made, {"scale_input": True}),
    "tied": (lambda made: made, {"tied": True, "scale_input": True}),
    "tied with one head": (with_one_head, {"tied": True}),
    "tied and stored for each": (with_copies, {"tied": True}),
    "without a prefix": (without_prefix, {}),
}


@pytest.mark.parametrize("name", slow_unless("tied", LAYOUTS))
def test_drafts_of_every_layout_are_those_of_a_replay(name, target, tmp_path):
    change, how = LAYOUTS[name]
    made = change(mlp(target, tiny_truth()[5:6], **how))
    llm = engine(made.save(tmp_path / "draft"), NUM_STAGES)
    assert facts.replayed(llm, made.draft(target), 5, NUM_STAGES, every=3) > 0


def test_a_width_of_zero_is_the_targets(made, tmp_path):
    with pytest.raises(SpecdecError, match=rf"(?s)SD-E175.*emb\.0\.weight.*\[{V}, {H}\], found \[{V}, {WIDTH}\]"):
        engine(made.changed(inner_dim=0).save(tmp_path / "draft"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["scarce", *(pytest.param(room, marks=pytest.mark.full) for room in ROOMS)])
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(room, directory, made, target):
    llm = engine(directory, NUM_STAGES, method="mlp_checkpoints:ForcedMlp", **(ROOMS["chunked"] | ROOMS[room]))

    @settings(max_examples=2, deadline=None, derandomize=True, database=None)
    @given(pattern=st.lists(st.integers(0, NUM_STAGES), min_size=2, max_size=7))
    def holds(pattern):
        facts.assert_drafts_of_a_fresh_prefill(llm, pattern, made.draft(target))

    holds()


@pytest.mark.slow
def test_device_form_of_a_step_gives_the_same_drafts(directory):
    names = ("mlp_checkpoints:ForcedMlp", "mlp_checkpoints:ForcedInDeviceForm")
    engines = (engine(directory, NUM_STAGES, method=name, max_num_batched_tokens=64) for name in names)
    facts.assert_same_drafts(engines, (3, 0, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("distribution", ["sparse", "dense"])
def test_reported_distribution_is_the_distribution_drawn_from(distribution, directory, made, target):
    llm = engine(directory, 3, method="mlp_checkpoints:RecordingMlp", speculative=facts.probabilistic(distribution))
    facts.assert_drawn_from(llm, lambda text, count, drawn: made.rollout(text, count, target, drawn)[1])


@pytest.mark.slow
def test_text_is_that_of_plain_decoding_in_chunks_and_with_preemption(start):
    facts.assert_plain_text_in_chunks_and_with_preemption(lambda **room: start(NUM_STAGES, **room))


@pytest.mark.full
class TestText(PlainText):
    """With drafts it is that of plain decoding."""


def test_it_is_recognised_by_its_model_type_or_its_key():
    for config in ({"model_type": "mlp_speculator"}, {"n_predict": 3}):
        assert is_mlp_speculator(Checkpoint(Path(), config))
    assert not is_mlp_speculator(Checkpoint(Path(), {"model_type": "llama"}))


def test_stages_beyond_the_number_of_drafts_are_not_loaded(directory):
    network = proposer_of(engine(directory, 2)).network
    assert [len(part) for part in (network.emb, network.proj, network.ln, network.head)] == [2, 2, 2, 2]


REFUSED = {
    "Arctic's": (
        lambda m: m.changed(architectures=["ArcticMLPSpeculatorPreTrainedModel"]),
        3,
        "ArcticMLP.*implemented",
    ),
    "no number of stages": (lambda m: m.changed(n_predict=None), 3, "SD-E170.*n_predict"),
    "more drafts than stages": (lambda m: m, 4, "num_speculative_tokens is 4, .* drafts at most 3"),
    "another vocabulary": (lambda m: m.changed(vocab_size=99), 3, "vocabulary is 99, .* is 4096"),
    "another hidden size": (lambda m: m.changed(emb_dim=128), 3, "hidden size is 128, .* is 256"),
    "a missing tensor": (lambda m: m.changed({"ln.1.bias": None}), 3, r"SD-E172.*ln\.1\.bias"),
    "an unknown tensor": (lambda m: m.changed({"gate.weight": torch.ones(2)}), 3, r"SD-E174.*gate\.weight"),
    "other widths": (lambda m: m.changed({"proj.1.weight": torch.ones(H, H)}), 3, r"SD-E175.*proj\.1\.weight"),
    "stages that are not tied": (lambda m: m.changed(tie_weights=True), 3, r"SD-E171.*emb\.1\.weight like emb\.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name, made, tmp_path):
    change, k, message = REFUSED[name]
    with pytest.raises(SpecdecError, match=f"(?s){message}"):
        engine(change(made).save(tmp_path / "draft"), k)
