"""What DFlash reads out of a checkpoint, what it refuses, and what it says then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_dflash
import pytest
import torch
from inside import proposer_of
from make_dflash import BLOCK, MASK_ID, H, Made, N, V, flattened, speculators, speculators_reduced, z_lab
from plugin_helpers import TINY

from specdec import LLM
from specdec.plugins.dflash.checkpoint import DFlashSpec
from specdec.plugins.dflash.proposer import DFlashProposer
from specdec.plugins.dflash.recognise import is_dflash
from specdec.sdk import ConfigError, Needs, ProposerConfig, Refusal, SpecdecError, TargetInfo
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.extensions import KNOWN, DraftKV

TARGET = TargetInfo(
    model="tiny",
    checkpoint_dir=None,
    config={},
    vocab_size=V,
    hidden_size=H,
    num_layers=N,
    num_kv_heads=2,
    head_dim=64,
    dtype="float32",
    device="cpu",
    max_model_len=256,
    max_num_seqs=4,
    block_size=16,
    extensions=frozenset(KNOWN),
    max_nodes=64,
)


def needs(made: Made, k: int = 4, **settings: Any) -> Needs:
    made.save()
    options = DFlashProposer.Options.parse(settings.pop("options", {}), "proposer_config")
    return DFlashProposer.needs(
        ProposerConfig(num_draft_tokens=k, model=str(made.path), options=options, **settings), TARGET
    )


def spec(made: Made) -> DFlashSpec:
    made.save()
    return DFlashSpec.read(Checkpoint.open(made.path), TARGET)


def change(made: Made, **changes: Any) -> Made:
    """The checkpoint with some fields changed; "a.b" is field b of a; None takes a field away."""
    for path, value in changes.items():
        *parents, name = path.split(".")
        fields = made.config
        for parent in parents:
            fields = fields[parent]
        fields.pop(name, None)
        if value is not None:
            fields[name] = value
    return made


def start(made: Made, k: int = 4, **speculative: Any) -> LLM:
    config = {"method": "dflash", "model": str(made.save().path), "num_speculative_tokens": k} | speculative
    return LLM("tiny", speculative_config=config, max_model_len=64)


def test_needs_follow_from_the_checkpoint_and_k(tmp_path):
    asked = needs(speculators(tmp_path), k=5)
    assert asked.hidden_states == (2, 4, 5)
    assert asked.max_draft_tokens == BLOCK - 1
    kv = asked.extension(DraftKV)
    assert (kv.num_layers, kv.num_heads, kv.head_dim, kv.lookahead) == (2, 2, 32, 6)
    assert not kv.depends_on_next_token
    assert (asked.distributions, asked.sampling) == ((), ())


def test_ids_of_layer_outputs_are_one_less_than_boundaries(tmp_path):
    assert needs(z_lab(tmp_path / "z")).hidden_states == (2, 4, 5)  # written as 1, 3, 4
    assert needs(flattened(tmp_path / "f")).hidden_states == (2, 4, 5)
    assert needs(speculators(tmp_path / "s")).hidden_states == (2, 4, 5)  # written as 2, 4, 5


@pytest.mark.parametrize(("num_layers", "expected"), [(1, (5,)), (2, (2, 6)), (3, (2, 4, 6)), (5, (2, 3, 4, 5, 6))])
def test_layer_ids_left_out_are_spread_over_the_target(num_layers, expected, tmp_path):
    made = change(z_lab(tmp_path), **{"dflash_config.target_layer_ids": None})
    made.config |= make_dflash.layer_fields(num_layers=num_layers)
    assert spec(made).boundaries == expected


def test_block_size_may_be_in_either_place(tmp_path):
    made = change(z_lab(tmp_path), **{"block_size": None, "dflash_config.block_size": 6})
    assert needs(made).max_draft_tokens == 5


def test_a_block_that_drafts_from_its_anchor_gives_one_more(tmp_path):
    made = change(z_lab(tmp_path), **{"dflash_config.sample_from_anchor": True})
    asked = needs(made, k=BLOCK)
    assert (asked.max_draft_tokens, asked.extension(DraftKV).lookahead) == (BLOCK, BLOCK)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("causal_block", "full_block")),
        ({"sliding_window_non_causal": True}, ("full_block", "full_block")),
        ({"is_causal": False}, ("full_block", "full_block")),
        ({"is_causal": True}, ("causal_block", "causal_block")),
        ({"dflash_config": {"causal": True}}, ("causal_block", "causal_block")),
        ({"dflash_config": {"causal": True}, "is_causal": False}, ("full_block", "full_block")),
    ],
)
def test_causality_inside_the_block_layer_by_layer(changes, expected, tmp_path):
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    nested = speculators(tmp_path / "nested")
    nested.config["transformer_layer_config"] |= types
    flat = flattened(tmp_path / "flat")
    flat.config |= types
    assert spec(change(nested, **changes)).modes == expected
    assert spec(change(flat, **changes)).modes == expected


def test_full_attention_of_speculators_files_is_never_causal(tmp_path):
    made = speculators(tmp_path)
    assert made.config["sliding_window_non_causal"] is False
    assert spec(made).modes == ("full_block", "full_block")


def test_a_layer_type_without_use_sliding_window_still_has_its_window(tmp_path):
    made = change(z_lab(tmp_path), layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    decoder = spec(made).decoder
    assert (decoder["sliding_window"], decoder["use_sliding_window"]) == (8, True)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5_000}, 5_000),
        ({"rope_theta": None}, 1_000_000),
        ({"rope_theta": 10_000, "rope_parameters": {"rope_type": "default", "rope_theta": 7_000}}, 7_000),
        ({"rope_theta": 10_000, "rope_parameters": {"rope_type": "default"}}, 10_000),
    ],
)
def test_rope_base_is_the_drafters_own(changes, theta, tmp_path):
    assert spec(change(z_lab(tmp_path), **changes)).decoder["rope_parameters"]["rope_theta"] == theta


def test_older_rope_scaling_is_read(tmp_path):
    made = change(z_lab(tmp_path), rope_scaling={"type": "linear", "factor": 2.0})
    assert spec(made).decoder["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000}


def test_facts_that_transformers_would_guess_are_the_formats(tmp_path):
    made = change(z_lab(tmp_path), head_dim=None, num_key_value_heads=None)
    decoder = spec(made).decoder
    assert (decoder["head_dim"], decoder["num_key_value_heads"]) == (H // 4, 4)


def test_logits_are_scaled_then_capped(tmp_path):
    made = change(
        z_lab(tmp_path), **{"dflash_config.output_multiplier": 0.5, "dflash_config.final_logit_softcapping": 3.0}
    )
    network = proposer_of(start(made)).network
    logits = torch.tensor([1.0, 20.0])
    assert torch.allclose(network._capped(logits), 3 * torch.tanh(logits / 6))


@pytest.mark.parametrize("make", [z_lab, speculators_reduced], ids=["targets-head", "own-head"])
@pytest.mark.parametrize("key", ["logit_scale", "transformer_layer_config.logit_scale"], ids=["top", "layers"])
def test_logits_are_multiplied_by_the_checkpoints_own_scale(make, key, tmp_path):
    plain, made = make(tmp_path / "plain"), make(tmp_path / "scaled")
    if "." in key:
        made.config.setdefault("transformer_layer_config", {})
    scaled = change(made, **{key: 0.25})
    heads = [proposer_of(start(each)).network.head for each in (plain, scaled)]
    states = torch.randn(3, H, generator=torch.Generator().manual_seed(0))
    assert torch.equal(heads[1](states), 0.25 * heads[0](states))


def test_a_scale_that_is_no_number_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="SD-E171"):
        start(change(z_lab(tmp_path), logit_scale="0.25"))


@pytest.mark.parametrize("make", [z_lab, flattened, speculators, speculators_reduced], ids=lambda make: make.__name__)
def test_every_layout_is_recognised_without_a_method(make, tmp_path):
    config = {"model": str(make(tmp_path / "draft").save().path), "num_speculative_tokens": 4}
    llm = LLM("tiny", speculative_config=config, max_model_len=64)
    assert type(proposer_of(llm)) is DFlashProposer


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]},
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": True}},
        {"architectures": ["MedusaModel"], "model_type": "medusa"},
        {"medusa_num_heads": 3},
        {"speculators_model_type": "mtp"},
        {"speculators_model_type": "peagle", "mask_token_id": 3, "architectures": ["PEagleDraftModel"]},
        {},
    ],
)
def test_checkpoints_of_other_families_are_not_claimed(config):
    assert not is_dflash(Checkpoint(Path(), config))


def test_the_targets_own_checkpoint_is_not_claimed():
    assert not is_dflash(Checkpoint.open(TINY / "target"))


def test_an_unknown_projector_is_refused(tmp_path):
    with pytest.raises(Refusal, match="'sorcery' is not implemented"):
        needs(change(z_lab(tmp_path), **{"dflash_config.projector_type": "sorcery"}))


TENSORS = {
    "layers.0.attention_conv.base_kernel": "DFlash2",
    "candidate_selector.hidden_projection.weight": "DFlash2",
    "markov_head.markov_w1.weight": "DSpark",
    "confidence_head.proj.weight": "DSpark",
    "refiner_head.readout.weight": "XPress",
    "prefix_gru.weight_ih_l0": "Domino",
    "lilicorr.weight": "LiLiCorr",
}


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_variants_tensors_are_never_left_out_silently(tensor, tmp_path):
    made = z_lab(tmp_path)
    made.tensors[tensor] = torch.zeros(4, 4)
    with pytest.raises(ConfigError, match=f"SD-E174 .* of a {TENSORS[tensor]}") as caught:
        start(made)
    assert tensor in str(caught.value)


@pytest.mark.parametrize("tensor", ["layers.0.self_attn.attention_sink_bias", "embed_proj.weight", "layers.2.x.weight"])
def test_unknown_tensors_are_an_error(tensor, tmp_path):
    made = z_lab(tmp_path)
    made.tensors[tensor] = torch.zeros(4)
    with pytest.raises(ConfigError, match="SD-E174") as caught:
        start(made)
    assert tensor in str(caught.value)


@pytest.mark.parametrize(
    "tensor", ["fc.weight", "norm.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm.weight"]
)
def test_a_missing_tensor_is_an_error(tensor, tmp_path):
    made = z_lab(tmp_path)
    del made.tensors[tensor]
    with pytest.raises(ConfigError, match="SD-E172") as caught:
        start(made)
    assert tensor in str(caught.value)


@pytest.mark.parametrize("tensor", ["lm_head.weight", "d2t"])
def test_a_reduced_vocabulary_needs_its_own_head_and_map(tensor, tmp_path):
    made = speculators_reduced(tmp_path)
    del made.tensors[tensor]
    with pytest.raises(ConfigError, match="SD-E172") as caught:
        start(made)
    assert tensor in str(caught.value)


def test_a_map_that_leaves_the_vocabulary_is_an_error(tmp_path):
    made = speculators_reduced(tmp_path)
    made.tensors["d2t"][-1] = V
    with pytest.raises(ConfigError, match="SD-E173"):
        start(made)


def test_layers_of_another_width_need_an_embedding_of_their_own(tmp_path):
    made = speculators(tmp_path)
    made.config["transformer_layer_config"]["hidden_size"] = 64
    made.config["target_hidden_size"] = H
    made.tensors = make_dflash.random_tensors(width=64)
    with pytest.raises(ConfigError, match="SD-E172") as caught:
        start(made)
    assert f"embed_tokens.weight [{V}, 64]" in str(caught.value)


def test_ids_that_do_not_match_the_projection_are_an_error(tmp_path):
    made = change(z_lab(tmp_path), **{"dflash_config.target_layer_ids": [1, 4]})
    with pytest.raises(ConfigError, match="SD-E175") as caught:
        start(made)
    assert "expected [256, 512], found [256, 768]" in str(caught.value)


UNFIT = {
    "hidden size": ({"target_hidden_size": 512}, "hidden size is 512, and this target's is 256"),
    "vocabulary": ({"vocab_size": 32_000}, "vocabulary is 32000, and this target's is 4096"),
    "layers": ({"num_target_layers": 36}, "number of layers is 36, and this target's is 8"),
    "mask": (
        {"dflash_config.mask_token_id": V},
        "mask_token_id 4096 has no row in the target's embedding of 4096 rows",
    ),
    "sink": ({"dflash_config.attention_sink_bias": True}, "attention_sink_bias: True, which is not implemented"),
    "scale": ({"dflash_config.attention_value_scale": 0.5}, "attention_value_scale: 0.5, which is not implemented"),
    "features": (
        {"dflash_config.use_aux_hidden_state": False},
        "use_aux_hidden_state: False, which is not implemented",
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128},
        "its 'dynamic' rotary scaling keeps its tables up to 128 positions, and max_model_len is 256",
    ),
    "ids of no convention": ({"dflash_config.layer_ids": [1, 2]}, "layer_ids"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_with_the_numbers(name, tmp_path):
    changes, words = UNFIT[name]
    with pytest.raises(Refusal) as caught:
        needs(change(z_lab(tmp_path), **changes))
    assert words in caught.value.reason
    assert caught.value.what_would_work


@pytest.mark.parametrize("k", [BLOCK, BLOCK + 3])
def test_more_drafts_than_the_block_has_slots_are_refused_with_the_number(k, tmp_path):
    with pytest.raises(Refusal) as caught:
        start(z_lab(tmp_path), k=k)
    assert f"num_speculative_tokens is {k}, and this proposer drafts at most 8 tokens" in caught.value.reason
    assert caught.value.what_would_work == '"num_speculative_tokens": 8'


def test_layers_that_the_target_does_not_have_are_refused_with_the_numbers(tmp_path):
    with pytest.raises(Refusal, match=r"after layer 9 of (.|\n)*the target has 8 layers"):
        start(change(z_lab(tmp_path), **{"dflash_config.target_layer_ids": [1, 3, 8]}))


REQUIRED = ["block_size", "aux_hidden_state_layer_ids", "mask_token_id", "transformer_layer_config"]


@pytest.mark.parametrize(
    "field", [*REQUIRED, "transformer_layer_config.num_hidden_layers", "transformer_layer_config.hidden_size"]
)
def test_a_missing_field_is_named_with_its_file(field, tmp_path):
    made = change(speculators(tmp_path), **{field: None})
    with pytest.raises(ConfigError, match="SD-E170") as caught:
        needs(made)
    assert field in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


WRONG = {
    "unsorted": {"aux_hidden_state_layer_ids": [4, 2, 5]},
    "repeated": {"aux_hidden_state_layer_ids": [2, 2, 5]},
    "negative": {"aux_hidden_state_layer_ids": [-1, 2, 5]},
    "texts": {"aux_hidden_state_layer_ids": ["2", "4"]},
    "none": {"aux_hidden_state_layer_ids": []},
    "block": {"block_size": "8"},
    "types": {"transformer_layer_config.layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_unusable_field_is_named_with_what_was_found(name, tmp_path):
    ((field, value),) = WRONG[name].items()
    with pytest.raises(ConfigError, match="SD-E171") as caught:
        needs(change(speculators(tmp_path), **WRONG[name]))
    assert field in str(caught.value)
    assert str(value) in str(caught.value)


def test_layers_of_another_make_are_refused(tmp_path):
    with pytest.raises(SpecdecError, match="'llama', whose attention is made of"):
        start(change(z_lab(tmp_path), model_type="llama"))


def test_publishers_other_tensor_names_are_read(tmp_path):
    plain, other = z_lab(tmp_path / "plain"), z_lab(tmp_path / "other")
    fused = {f"layers.{i}.self_attn": [f"layers.{i}.self_attn.{x}_proj.weight" for x in "qkv"] for i in range(2)}
    for stem, names in fused.items():
        other.tensors[f"{stem}.qkv_proj.weight"] = torch.cat([other.tensors.pop(name) for name in names])
    other.tensors["encoder.fc.weight"] = other.tensors.pop("fc.weight")
    other.tensors["encoder.output_norm_enc.weight"] = other.tensors.pop("hidden_norm.weight")
    networks = [proposer_of(start(made)).network for made in (plain, other)]
    expected, found = (network.state_dict() for network in networks)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def save_mask(made: Made, saved: object) -> Made:
    made.path.mkdir(exist_ok=True)
    torch.save(saved, made.path / "mask_embedding.pt")
    return made


def test_a_bare_mask_embedding_needs_no_token(tmp_path):
    made = save_mask(change(z_lab(tmp_path), **{"dflash_config.mask_token_id": None}), torch.ones(H))
    assert torch.equal(proposer_of(start(made)).network.mask, torch.ones(H))


@pytest.mark.parametrize(
    ("saved", "code"),
    [
        ({"mask_token_id": MASK_ID + 1, "embedding": torch.ones(H)}, "SD-E171"),
        ({"mask_token_id": MASK_ID, "embedding": torch.ones(H + 1)}, "SD-E175"),
        ({"mask_token_id": MASK_ID}, "SD-E175"),
    ],
    ids=["another-token", "another-width", "no-embedding"],
)
def test_a_mask_embedding_that_does_not_fit_is_an_error(saved, code, tmp_path):
    with pytest.raises(ConfigError, match=code) as caught:
        start(save_mask(z_lab(tmp_path), saved))
    assert "mask_embedding.pt" in str(caught.value)


def test_a_mask_token_may_be_named(tmp_path):
    vocabulary = json.loads((TINY / "target" / "tokenizer.json").read_text())
    name = next(each["content"] for each in vocabulary["added_tokens"] if each["id"] == MASK_ID)
    fields = {"dflash_config.mask_token_id": None, "dflash_config.mask_token": name}
    by_name, by_id = start(change(z_lab(tmp_path / "name"), **fields)), start(z_lab(tmp_path / "id"))
    rows = [proposer_of(llm).network.mask for llm in (by_name, by_id)]
    assert torch.equal(*rows)
    with pytest.raises(ConfigError, match="SD-E170"):
        start(change(z_lab(tmp_path / "unknown"), **(fields | {"dflash_config.mask_token": "<nothing>"})))


def test_a_dense_distribution_over_a_reduced_vocabulary_is_declared_with_its_map(tmp_path):
    made = speculators_reduced(tmp_path)
    asked = needs(made, draft_sample_method="probabilistic", options={"draft_distribution": "dense"})
    assert asked.draft_vocabulary == tuple((torch.arange(640) + made.tensors["d2t"]).tolist())


def test_a_map_of_every_token_in_order_is_none(tmp_path):
    made = speculators(tmp_path)
    made.tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    assert (
        needs(made, draft_sample_method="probabilistic", options={"draft_distribution": "dense"}).draft_vocabulary
        is None
    )
    assert proposer_of(start(made)).vocabulary is None


def test_importing_the_plugin_and_its_recogniser_loads_no_torch():
    code = "import sys, specdec.plugins.dflash.recognise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
