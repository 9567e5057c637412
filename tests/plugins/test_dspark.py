"""DSpark in the engine: tokens from left to right, in both layouts of the slots, with every kind of head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import facts
import make_dflash
import pytest
import torch
from block_engines import assert_drawn_from, assert_replayed, speculate, walked
from inside import proposer_of
from make_dflash import BLOCK, Made, N, Replay, V
from make_dspark import DSparkReplay, deepspec, dspark_of_speculators, dspark_over_trained
from plugin_helpers import TargetStates
from sweeps import slow_unless
from test_dflash_checkpoints import change, needs, spec, start

from specdec import LLM
from specdec.plugins.dflash.proposer import DFlashProposer
from specdec.plugins.dflash.recognise import is_dflash, is_dspark
from specdec.plugins.draft_model.recognise import is_language_model
from specdec.sdk import ConfigError, Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.extensions import DraftKV

pytestmark = pytest.mark.slow

NEW = 16  # tokens that an engine generates


def gated(path: Path) -> Made:
    return deepspec(path, "gated", confidence="outputs")


def recurrent(path: Path) -> Made:
    return deepspec(path, "rnn", confidence="none")


def reads_the_embedding(path: Path) -> Made:
    """Layer -1 is the embedding's output."""
    made = deepspec(path)
    made.config["target_layer_ids"] = [-1, 3, 4]
    made.boundaries = (0, 4, 5)
    return made


def lfm2(path: Path) -> Made:
    """LFM2's: Qwen3's layers, but rotary pairs lie side by side."""
    made = deepspec(path)
    made.config |= {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    made.config["dflash_config"] = {name: made.config.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    made.neighbours = True
    return made


def with_its_own_head(path: Path) -> Made:
    made = deepspec(path)
    made.tensors["embed_tokens.weight"] = TargetStates().embedding.detach().bfloat16()
    made.tensors["lm_head.weight"] = torch.randn(V, make_dflash.H, generator=torch.Generator().manual_seed(6))
    return made


def anchor_first(path: Path) -> Made:
    return dspark_of_speculators(path, from_anchor=True)


def fill_in(path: Path) -> Made:
    return dspark_of_speculators(path, from_anchor=False, kind="gated")


def fill_in_recurrent(path: Path) -> Made:
    return dspark_of_speculators(path, from_anchor=False, kind="rnn")


MAKERS: dict[str, Callable[[Path], Made]] = {
    make.__name__: make
    for make in (
        deepspec,
        gated,
        recurrent,
        reads_the_embedding,
        lfm2,
        with_its_own_head,
        anchor_first,
        fill_in,
        fill_in_recurrent,
    )
}


@pytest.mark.parametrize("name", slow_unless("fill_in_recurrent", MAKERS))
def test_drafts_of_every_layout_and_head_are_those_of_a_replay(name, prompt, sequence, target, tmp_path):
    made = MAKERS[name](tmp_path / "draft").save()
    k = BLOCK - made.first_slot
    assert_replayed(speculate(made, k), DSparkReplay(made, target), sequence, len(prompt), k, NEW)


@pytest.mark.parametrize("kind", slow_unless("rnn", ["vanilla", "gated", "rnn"]))
def test_accepted_counts_are_those_of_a_replay(kind, prompt, sequence, target, tmp_path):
    made = dspark_over_trained(tmp_path, kind).save()
    assert assert_replayed(speculate(made, 7), DSparkReplay(made, target), sequence, len(prompt), 7) > 0


def test_a_head_without_bias_drafts_what_dflash_does(prompt, sequence, target, tmp_path):
    made = dspark_over_trained(tmp_path)
    made.tensors["markov_head.markov_w2.weight"] *= 0
    plain = make_dflash.trained()
    assert_replayed(speculate(made.save(), 7), Replay(plain, target), sequence, len(prompt), 7, NEW)


def test_without_a_markov_head_slots_are_drawn_alone(prompt, sequence, target, tmp_path):
    made = change(deepspec(tmp_path, confidence="none"), markov_rank=0)
    made.tensors = {name: each for name, each in made.tensors.items() if not name.startswith("markov_head")}
    assert_replayed(speculate(made.save(), 4), Replay(made, target), sequence, len(prompt), 4, NEW)


@pytest.mark.parametrize("distribution", slow_unless("sparse", ["sparse", "dense"]))
@pytest.mark.parametrize("make", [recurrent, fill_in], ids=lambda make: make.__name__)
def test_reported_distributions_are_conditioned_on_the_drawn_tokens(make, distribution, target, tmp_path):
    made = make(tmp_path / "draft").save()
    llm = speculate(made, 4, method="make_dflash:Recording", speculative=facts.probabilistic(distribution))
    assert_drawn_from(llm, walked(DSparkReplay(made, target)), made, 12)


# The layout of the slots


def test_a_speculators_file_that_does_not_say_which_slot_drafts_first_is_refused(tmp_path):
    made = change(anchor_first(tmp_path), sample_from_anchor=None)
    with pytest.raises(ConfigError, match="SD-E282") as caught:
        needs(made)
    assert '"sample_from_anchor": false' in str(caught.value)


@pytest.mark.parametrize("make", [anchor_first, fill_in], ids=lambda make: make.__name__)
def test_an_option_says_which_slot_drafts_first(make, prompt, sequence, target, tmp_path):
    made = change(make(tmp_path / "draft"), sample_from_anchor=None).save()
    llm = speculate(made, 3, speculative={"sample_from_anchor": make is anchor_first})
    assert_replayed(llm, DSparkReplay(made, target), sequence, len(prompt), 3, NEW)


def test_the_layouts_draft_different_tokens(prompt, sequence, target, tmp_path):
    made = anchor_first(tmp_path)
    right = DSparkReplay(made, target).draft(sequence, len(prompt) + 1, 4)
    made.first_slot = 1
    assert DSparkReplay(made, target).draft(sequence, len(prompt) + 1, 4) != right


def test_deepspec_files_do_not_say_it_and_mean_the_anchors_slot(tmp_path):
    made = deepspec(tmp_path)
    assert "sample_from_anchor" not in made.config
    asked = needs(made, k=BLOCK)
    assert (asked.max_draft_tokens, asked.extension(DraftKV).lookahead) == (BLOCK, BLOCK)
    made.config["sample_from_anchor"] = False
    asked = needs(made, k=BLOCK - 1)
    assert (asked.max_draft_tokens, asked.extension(DraftKV).lookahead) == (BLOCK - 1, BLOCK)


def test_more_drafts_than_the_trained_block_are_refused(tmp_path):
    with pytest.raises(Refusal, match=f"drafts at most {BLOCK} tokens"):
        start(deepspec(tmp_path), k=BLOCK + 1)


# Layer ids


def test_ids_of_layer_outputs_are_one_less_than_boundaries_and_the_embedding_is_minus_one(tmp_path):
    assert needs(deepspec(tmp_path / "a")).hidden_states == (2, 4, 5)  # written as 1, 3, 4
    assert needs(reads_the_embedding(tmp_path / "b")).hidden_states == (0, 4, 5)  # written as -1, 3, 4
    assert needs(anchor_first(tmp_path / "c")).hidden_states == (2, 4, 5)  # written as 2, 4, 5


def test_the_last_layers_output_is_refused_as_trainers_take_it_in_two_ways(tmp_path):
    with pytest.raises(Refusal, match=r"names the last layer \(7\)"):
        needs(change(deepspec(tmp_path), target_layer_ids=[1, 3, N - 1]))


def test_the_number_of_target_layers_may_be_of_those_that_are_read(tmp_path):
    assert spec(change(deepspec(tmp_path), num_target_layers=3)).num_target_layers is None
    with pytest.raises(Refusal, match="number of layers is 36"):
        needs(change(deepspec(tmp_path), num_target_layers=36))


@pytest.mark.parametrize("ids", [[-2, 1], [3, 1], [1, 1], ["1"], []])
def test_ids_that_are_none_are_an_error(ids, tmp_path):
    with pytest.raises(ConfigError, match="SD-E171"):
        needs(change(deepspec(tmp_path), target_layer_ids=ids))


# Recognition


@pytest.mark.parametrize("make", [deepspec, anchor_first], ids=lambda make: make.__name__)
def test_checkpoints_are_recognised_without_a_method(make, tmp_path):
    config = {"model": str(make(tmp_path).save().path), "num_speculative_tokens": 4}
    llm = LLM("tiny", speculative_config=config, max_model_len=64)
    assert type(proposer_of(llm)) is DFlashProposer


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3DSparkModel"]},
        {"architectures": ["DSparkMiniMaxDraftModel"]},
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 64}},
        {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]},
        {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
    ],
)
def test_marks_of_dspark(config):
    checkpoint = Checkpoint(Path(), config)
    assert is_dspark(checkpoint)
    assert not is_dflash(checkpoint)


def test_a_target_with_stages_inside_is_no_plain_draft_model(tmp_path):
    config = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "dspark_block_size": 5}
    assert not is_language_model(Checkpoint(tmp_path, config))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "in a target": ({"dspark_noise_token_id": 3}, "DeepSeek-V4 target with DSpark stages inside"),
    "Gemma 4": ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel is not implemented"),
    "Kimi K3": ({"architectures": ["K3DSparkModel"]}, r"K3DSparkModel .* latent attention \(MLA\)"),
    "MiniMax M3": ({"architectures": ["DSparkMiniMaxDraftModel"]}, "draft layers are MiniMax-M3's"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_relatives_with_other_layers_are_refused_by_name(name, tmp_path):
    changes, words = REFUSED[name]
    with pytest.raises(Refusal, match=words):
        needs(change(deepspec(tmp_path), **changes))


# Malformed checkpoints


@pytest.mark.parametrize("field", ["markov_rank", "target_layer_ids", "block_size", "mask_token_id"])
def test_a_missing_field_is_named(field, tmp_path):
    with pytest.raises(ConfigError, match="SD-E170") as caught:
        needs(change(deepspec(tmp_path), **{field: None}))
    assert field in str(caught.value)


def test_an_unknown_type_of_head_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="SD-E171") as caught:
        needs(change(deepspec(tmp_path), markov_head_type="sorcery"))
    assert "vanilla, gated, rnn" in str(caught.value)


@pytest.mark.parametrize("tensor", ["markov_head.markov_w1.weight"])
def test_a_missing_tensor_is_an_error(tensor, tmp_path):
    made = deepspec(tmp_path)
    del made.tensors[tensor]
    with pytest.raises(ConfigError, match="SD-E172") as caught:
        start(made)
    assert tensor in str(caught.value)


def test_tensors_of_another_head_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match="SD-E174") as caught:
        start(change(deepspec(tmp_path, "gated"), markov_head_type="vanilla"))
    assert "markov_head.gate_proj.weight" in str(caught.value)


def test_a_head_of_another_rank_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="SD-E175") as caught:
        start(change(deepspec(tmp_path), markov_rank=16))
    assert "expected [4096, 16], found [4096, 8]" in str(caught.value)
