"""DFlash2, Domino, XPress and LiLiCorr in the engine: each drafts what its format says, or what DFlash does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import facts
import make_dflash
import pytest
import torch
from block_engines import assert_drawn_from, assert_replayed, speculate, walked
from inside import proposer_of
from make_dflash import BLOCK, Made, Replay, V, trained
from make_walks import (
    DFlash2Replay,
    DominoReplay,
    LiLiCorrReplay,
    XPressReplay,
    dflash2,
    dflash2_with_factors,
    domino,
    lilicorr,
    xpress,
)
from replaying import continued
from sweeps import slow_unless
from test_dflash_checkpoints import change, needs, spec, start
from walk_replay import WalkReplay

from specdec import SamplingParams
from specdec.plugins.dflash.recognise import is_dflash, is_dspark
from specdec.plugins.dflash.variants import Member
from specdec.sdk import ConfigError, Refusal
from specdec.sdk.checkpoint import Checkpoint

pytestmark = pytest.mark.slow

NEW = 12  # tokens that an engine generates


def in_place(path: Path) -> Made:
    """Domino whose slots draft the tokens at their places, the first two from the slots alone."""
    return domino(path, shift=False, num_pure=2)


def from_anchor(path: Path) -> Made:
    return xpress(path, from_anchor=True)


def convolved(path: Path) -> Made:
    return lilicorr(path, convolved=True, head_biases=False)


CASES: dict[str, tuple[Callable[[Path], Made], type[WalkReplay]]] = {
    "DFlash2": (dflash2, DFlash2Replay),
    "DFlash2 with factors": (dflash2_with_factors, DFlash2Replay),
    "Domino": (domino, DominoReplay),
    "Domino in place": (in_place, DominoReplay),
    "XPress": (xpress, XPressReplay),
    "XPress from the anchor": (from_anchor, XPressReplay),
    "LiLiCorr": (lilicorr, LiLiCorrReplay),
    "LiLiCorr with convolutions": (convolved, LiLiCorrReplay),
}
EACH = pytest.mark.parametrize("name", slow_unless("LiLiCorr with convolutions", CASES))


@EACH
def test_drafts_of_every_format_are_those_of_a_replay(name, prompt, sequence, target, tmp_path):
    make, replay_of = CASES[name]
    made = make(tmp_path / "draft").save()
    k = BLOCK - made.first_slot
    llm = speculate(made, k)
    assert_replayed(llm, replay_of(made, target), sequence, len(prompt), k, NEW)


def over_trained(path: Path, kind: str) -> Made:
    """The packaged DFlash with a head that draws as DFlash does: its correction is zero."""
    base = trained()
    if kind == "DFlash2":
        return dflash2(path, identity=True, base=base)
    if kind == "Domino":
        return domino(path, shift=False, base=base, size=0.0)
    return xpress(path, base=base, size=0.0)


@pytest.mark.parametrize("kind", ["DFlash2", "Domino", "XPress"])
def test_a_head_without_correction_drafts_what_dflash_does(kind, prompt, sequence, target, tmp_path):
    made = over_trained(tmp_path, kind)
    if kind != "XPress":
        del made.config["speculators_model_type"]
        made.config |= made.config.pop("transformer_layer_config") | {"dflash_config": made.config["dflash_config"]}
        made.config["target_layer_ids"] = [each - 1 for each in made.config.pop("aux_hidden_state_layer_ids")]
    accepted = assert_replayed(speculate(made.save(), 7), Replay(trained(), target), sequence, len(prompt), 7)
    assert accepted > 0


@EACH
def test_reported_distributions_are_those_drawn_from(name, target, tmp_path):
    make, replay_of = CASES[name]
    made = make(tmp_path / "draft").save()
    llm = speculate(made, 4, method="make_dflash:Recording", speculative=facts.probabilistic())
    assert_drawn_from(llm, walked(replay_of(made, target)), made, 6, atol=3e-4)


def test_the_selector_reports_no_other_tokens_than_its_candidates(prompt, tmp_path):
    made = dflash2(tmp_path).save()
    llm = speculate(made, 4, method="make_dflash:Recording", speculative={"draft_sample_method": "probabilistic"})
    continued(llm, [prompt], SamplingParams(temperature=2.0, max_tokens=6, ignore_eos=True, seed=1))
    for _, draft in proposer_of(llm).steps:
        assert int((draft.distribution.sparse_probs[0] > 0).sum(-1).max()) <= 4


# Recognition


@pytest.mark.parametrize(
    ("make", "member"),
    [
        (dflash2, Member.DFLASH2),
        (domino, Member.DOMINO),
        (xpress, Member.XPRESS),
        (lilicorr, Member.LILICORR),
        (convolved, Member.LILICORR),
    ],
)
def test_configurations_say_which_member_it_is(make, member, tmp_path):
    made = make(tmp_path).save()
    assert spec(made).member is member
    assert is_dflash(Checkpoint.open(made.path))
    assert not is_dspark(Checkpoint.open(made.path))
    change(made, architectures=None)  # the keys tell it too
    assert made.config.get("speculators_model_type") or spec(made).member is member


def test_the_muse_assistant_is_plain_dflash_with_windows_that_see_both_ways(tmp_path):
    layers = make_dflash.layer_fields()
    del layers["vocab_size"], layers["use_sliding_window"]
    config = layers | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "block_size": BLOCK,
        "mask_token_id": make_dflash.MASK_ID,
        "target_layer_ids": [1, 3, 4],
    }
    tensors = make_dflash.random_tensors()
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    made = Made(tmp_path, config=config, tensors=tensors).save()
    assert is_dflash(Checkpoint.open(tmp_path))
    read = spec(made)
    assert (read.member, read.boundaries, read.decoder["model_type"]) == (Member.DFLASH, (2, 4, 5), "qwen3")
    assert read.modes == ("full_block", "full_block")
    start(made)


def test_jetspec_is_dflash_that_is_causal_in_the_block(tmp_path):
    made = change(make_dflash.z_lab(tmp_path), **{"dflash_config.causal": True})
    read = spec(made)
    assert (read.member, read.modes) == (Member.DFLASH, ("causal_block", "causal_block"))


# Malformed checkpoints

MISSING = {
    "selector_top_k": dflash2,
    "conv_group_size": dflash2,
    "gru_hidden_dim": domino,
    "lilicorr_vector_eps": lilicorr,
}


@pytest.mark.parametrize("field", MISSING)
def test_a_missing_field_is_named(field, tmp_path):
    with pytest.raises(ConfigError, match="SD-E170") as caught:
        needs(change(MISSING[field](tmp_path), **{f"dflash_config.{field}": None}))
    assert field in str(caught.value)


def test_a_group_that_does_not_divide_the_channels_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="SD-E171"):
        needs(change(dflash2(tmp_path), **{"dflash_config.conv_group_size": 7}))


@pytest.mark.parametrize(
    ("make", "tensor"),
    [
        (dflash2, "layers.1.mlp_conv.base_kernel"),
        (dflash2, "candidate_selector.successor_codebook"),
        (domino, "embed_proj.2.weight"),
        (xpress, "refiner_head.mix_l"),
        (lilicorr, "lilicorr.layers.0.attn.in_proj_weight"),
    ],
)
def test_a_missing_tensor_is_named(make, tensor, tmp_path):
    made = make(tmp_path)
    del made.tensors[tensor]
    with pytest.raises(ConfigError, match="SD-E172") as caught:
        start(made)
    assert tensor in str(caught.value)


@pytest.mark.parametrize("make", [dflash2, domino, lilicorr])
def test_formats_without_a_draft_vocabulary_refuse_one(make, tmp_path):
    with pytest.raises(Refusal, match="its draft vocabulary has 640 of 4096 tokens"):
        needs(change(make(tmp_path), draft_vocab_size=640))


def test_a_reranker_of_the_slots_behind_the_anchor_refuses_drafts_of_it(tmp_path):
    with pytest.raises(Refusal, match="its slots are those behind the anchor"):
        start(change(lilicorr(tmp_path), **{"dflash_config.sample_from_anchor": True}))


def test_tensors_of_another_member_are_an_error(tmp_path):
    made = dflash2(tmp_path)
    made.tensors["markov_head.markov_w1.weight"] = torch.zeros(V, 8)
    with pytest.raises(ConfigError, match=r"SD-E174 .* of a DSpark"):
        start(made)
