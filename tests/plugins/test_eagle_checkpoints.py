"""What EAGLE-1 and EAGLE-3 read out of a checkpoint, what they refuse, and what they say then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import proposer_of
from make_eagle import (
    FFN,
    HEAD_DIM,
    MAKERS,
    H,
    Made,
    N,
    V,
    Weights,
    latent,
    layer_fields,
    modelopt_final_state,
    narrow,
    peagle,
    safeailab,
    safeailab_eagle1,
    safeailab_same_vocabulary,
    specforge,
    speculators,
    wrapped_eagle1,
)
from plugin_helpers import TINY
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from specdec import LLM
from specdec.plugins.eagle.proposer import Eagle3Proposer, EagleProposer
from specdec.plugins.eagle.recognise import is_eagle, is_eagle3
from specdec.sdk import ConfigError, Needs, ProposerConfig, Refusal, TargetInfo
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


def needs(made: Made, k: int = 4, *, options: dict[str, Any] | None = None, **settings: Any) -> Needs:
    made.save()
    proposer = EagleProposer if made.method == "eagle" else Eagle3Proposer
    parsed = proposer.Options.parse(options or {}, "proposer_config")
    config = ProposerConfig(num_draft_tokens=k, model=str(made.path), options=parsed, **settings)
    return proposer.needs(config, TARGET)


def start(made: Made, **speculative: Any) -> LLM:
    config = {"method": made.method, "model": str(made.save().path), "num_speculative_tokens": 4} | speculative
    return LLM("tiny", speculative_config=config, max_model_len=64)


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


def with_nested_ids(path: Path, ids: list[Any]) -> Made:
    made = change(specforge(path), **{"eagle_config.eagle_aux_hidden_state_layer_ids": ids})
    made.tensors["fc.weight"] = torch.zeros(H, len(ids) * H)
    return change(made, fc_norm=False)


def test_eagle1_needs_the_final_hidden_state_and_rows_that_depend_on_the_next_token(tmp_path):
    asked = needs(wrapped_eagle1(tmp_path), k=5)
    kv = asked.extension(DraftKV)
    assert asked.hidden_states == ("final",)
    assert (kv.num_layers, kv.num_heads, kv.head_dim, kv.lookahead) == (2, 2, HEAD_DIM, 4)
    assert kv.depends_on_next_token


def test_eagle3_layers_are_counted_by_their_tensors(tmp_path):
    made = safeailab(tmp_path)
    assert made.config["num_hidden_layers"] == 40
    assert needs(made).extension(DraftKV).num_layers == 1


def test_without_ids_the_usual_boundaries_are_read(tmp_path):
    assert needs(safeailab(tmp_path)).hidden_states == (2, N // 2, N - 3)


@pytest.mark.parametrize(
    ("ids", "convention", "expected"),
    [
        ([1, 3, 4], "auto", (2, 4, 5)),
        ([2, 4, 5], "auto", (2, 4, 5)),
        ([4, 6, 8], "auto", (4, 6, 8)),
        ([1, 4, 8], "auto", (1, 4, 8)),
        ([2, 4, 5], "layer_output", (3, 5, 6)),
        ([1, 3, 4], "boundary", (1, 3, 4)),
        ([0, 3, 7], "layer_output", (1, 4, 8)),
        ([0, 3, 7], "boundary", (0, 3, 7)),
    ],
)
def test_nested_ids_are_resolved_to_boundaries(ids, convention, expected, tmp_path):
    asked = needs(with_nested_ids(tmp_path, ids), options={"aux_layer_convention": convention})
    assert asked.hidden_states == expected


@pytest.mark.parametrize(("convention", "expected"), [("auto", (1, 3, 6)), ("layer_output", (2, 4, 7))])
def test_ids_at_the_top_level_are_boundaries_unless_the_user_says_otherwise(convention, expected, tmp_path):
    assert needs(speculators(tmp_path), options={"aux_layer_convention": convention}).hidden_states == expected


def test_nested_ids_that_begin_at_zero_are_refused_unless_the_user_says_how_to_read_them(tmp_path):
    with pytest.raises(Refusal, match=r"\[0, 3, 7\] may count layer outputs or boundaries") as caught:
        needs(with_nested_ids(tmp_path, [0, 3, 7]))
    assert '"aux_layer_convention": "layer_output" or "boundary"' in str(caught.value)


@pytest.mark.parametrize("ids", [[3, 1, 4], [2, 2, 4], [2, "4", 5], [2, True, 5]])
def test_ids_that_are_unsorted_repeated_or_no_numbers_are_an_error(ids, tmp_path):
    with pytest.raises(ConfigError, match=r"SD-E171 .*eagle_config.eagle_aux_hidden_state_layer_ids"):
        needs(with_nested_ids(tmp_path, ids))


@pytest.mark.parametrize(
    ("ids", "convention", "found"),
    [([2, 4, 9], "auto", r"\(2, 4, 9\)"), ([2, 4, 8], "layer_output", r"\(3, 5, 9\)"), ([-1, 2, 3], "boundary", "-1")],
)
def test_ids_that_the_target_does_not_have_are_refused(ids, convention, found, tmp_path):
    with pytest.raises(Refusal, match=rf"boundaries .*{found}.*the target has 0 \.\. 8"):
        needs(with_nested_ids(tmp_path, ids), options={"aux_layer_convention": convention})


def test_ids_that_do_not_match_the_projection_are_an_error(tmp_path):
    made = change(speculators(tmp_path), eagle_aux_hidden_state_layer_ids=[2, 4])
    with pytest.raises(ConfigError, match="SD-E175") as caught:
        needs(made)
    assert "2 features" in str(caught.value)
    assert f"fc.weight [{H}, {3 * H}]" in str(caught.value)


def test_resolved_boundaries_are_logged(tmp_path, caplog):
    caplog.set_level("INFO", "specdec")
    start(specforge(tmp_path))
    assert "boundaries (2, 3, 6)" in caplog.text


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_every_layout_is_recognised_as_one_of_the_two(make, tmp_path):
    opened = Checkpoint.open(make(tmp_path).save().path)
    assert (is_eagle(opened), is_eagle3(opened)) == (
        make(tmp_path).method == "eagle",
        make(tmp_path).method == "eagle3",
    )


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 1},
        {"architectures": ["DFlashDraftModel"], "dflash_config": {}, "draft_vocab_size": 640},
        {"architectures": ["Qwen3DSparkModel"], "draft_vocab_size": 640},
        {"architectures": ["MedusaModel"], "model_type": "medusa", "num_hidden_layers": 1},
        {"medusa_num_heads": 3},
        {"speculators_model_type": "mtp"},
        {"speculators_model_type": "dflash", "draft_vocab_size": 640},
        {},
    ],
)
def test_checkpoints_of_other_families_are_not_claimed(config, tmp_path):
    assert not is_eagle(Checkpoint(tmp_path, config))
    assert not is_eagle3(Checkpoint(tmp_path, config))


@pytest.mark.parametrize("name", ["target", "dflash"])
def test_packaged_checkpoints_of_other_families_are_not_claimed(name):
    opened = Checkpoint.open(TINY / name)
    assert not is_eagle(opened)
    assert not is_eagle3(opened)


def test_one_method_refuses_the_others_checkpoint_and_names_it(tmp_path):
    eagle1, eagle3 = safeailab_eagle1(tmp_path / "1"), safeailab_same_vocabulary(tmp_path / "3")
    eagle1.method, eagle3.method = "eagle3", "eagle"
    with pytest.raises(Refusal, match=r'this is an EAGLE-1 checkpoint\n.*"method": "eagle"'):
        needs(eagle1)
    with pytest.raises(Refusal, match=r'this is an EAGLE-3 checkpoint\n.*"method": "eagle3"'):
        needs(eagle3)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"target_hidden_size": 512}, "hidden size is 512, and this target's is 256"),
        ({"transformer_layer_config.vocab_size": 32000}, "vocabulary is 32000, and this target's is 4096"),
    ],
)
def test_a_checkpoint_for_another_target_is_refused_with_the_numbers(changes, numbers, tmp_path):
    made = change(speculators(tmp_path), **changes)
    made.tensors["fc.weight"] = torch.zeros(H, 3 * changes.get("target_hidden_size", H))
    with pytest.raises(Refusal, match=numbers):
        needs(made)


def test_eagle1_of_another_width_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(Refusal, match="hidden size is 128, and this target's is 256"):
        needs(change(safeailab_eagle1(tmp_path), hidden_size=128))


@pytest.mark.parametrize("make", [safeailab_eagle1, safeailab], ids=lambda make: make.__name__)
def test_rotary_tables_that_grow_with_the_batch_are_refused_beyond_their_first_length(make, tmp_path):
    made = change(make(tmp_path), rope_scaling={"type": "dynamic", "factor": 2.0})
    assert needs(change(made, max_position_embeddings=256)).extension(DraftKV).num_layers == 1
    with pytest.raises(Refusal, match=r"'dynamic' rotary scaling keeps its tables up to 128 .* max_model_len is 256"):
        needs(change(made, max_position_embeddings=128))


def test_a_truncated_eagle1_vocabulary_is_refused(tmp_path):
    with pytest.raises(Refusal, match="truncated_vocab_size is 100 of 4096"):
        needs(change(wrapped_eagle1(tmp_path), truncated_vocab_size=100))


def test_a_mask_token_without_an_embedding_is_refused(tmp_path):
    with pytest.raises(Refusal, match="mask token 4096 has no row in an embedding of 4096 rows"):
        needs(change(peagle(tmp_path), mask_token_id=V))


def test_parallel_drafting_needs_its_mask_token_and_its_mask(tmp_path):
    with pytest.raises(ConfigError, match=r"SD-E170 .*'mask_token_id'"):
        needs(change(peagle(tmp_path / "a"), mask_token_id=None))
    made = peagle(tmp_path / "b")
    made.tensors.pop("mask_hidden")
    with pytest.raises(ConfigError, match="SD-E172"):
        needs(made)


@pytest.mark.parametrize(("make", "asked"), [(peagle, False), (speculators, True)])
def test_a_way_of_drafting_that_it_was_not_trained_for_is_refused(make, asked, tmp_path):
    with pytest.raises(Refusal, match=f"parallel_drafting is {asked}.*\n.*{not asked}"):
        needs(make(tmp_path), options={"parallel_drafting": asked})


def test_a_first_layer_that_reads_no_token_is_refused(tmp_path):
    made = modelopt_final_state(tmp_path)
    made.tensors |= Weights().layer(0, H)
    with pytest.raises(Refusal, match="reads 256 inputs: the hidden state alone"):
        needs(made)


@pytest.mark.parametrize("flag", ["mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "mla_of_tomorrow"])
def test_a_flag_of_latent_attention_that_is_not_implemented_is_refused_by_name(flag, tmp_path):
    with pytest.raises(Refusal, match=f"its latent attention has {flag}, which is not implemented"):
        needs(change(latent(tmp_path), **{flag: True}))
    assert needs(change(latent(tmp_path), **{flag: False})).extension(DraftKV) is not None


def test_the_draft_kv_of_latent_attention_is_its_keys_and_values(tmp_path):
    kv = needs(latent(tmp_path)).extension(DraftKV)
    assert (kv.num_layers, kv.num_heads, kv.head_dim, kv.value_head_dim) == (1, 4, 16 + 8, 24)


@pytest.mark.parametrize("size", ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_latent_attention_without_one_of_its_sizes_is_an_error(size, tmp_path):
    with pytest.raises(ConfigError, match=f"SD-E170 .*{size}"):
        needs(change(latent(tmp_path), **{size: None}))


def test_tensors_of_latent_attention_without_its_rank_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"SD-E170 .*'kv_lora_rank'"):
        needs(change(latent(tmp_path), kv_lora_rank=None))


@pytest.mark.parametrize("changed", [{"q_lora_rank": None}, {"kv_lora_rank": 16}, {"v_head_dim": 8}], ids=str)
def test_latent_attention_of_other_sizes_than_stated_is_an_error(changed, tmp_path):
    with pytest.raises(ConfigError, match=r"SD-E17[245]"):
        start(change(latent(tmp_path), **changed))


def test_latent_attention_of_an_eagle1_head_is_refused(tmp_path):
    with pytest.raises(Refusal, match="EAGLE-1 with multi-head latent attention"):
        needs(change(safeailab_eagle1(tmp_path), kv_lora_rank=64))


VARIANTS = {
    "parallel_draft_heads.0.medusa_layers.0.linear.weight": "Medusa heads",
    "layers.1.hidden_norm.weight": "multi-layer EAGLE-3",
    "layers.0.mlp.gate_proj.weight_scale": "quantized",
    "embed_layernorm.weight": "norms around its projection",
    "pre_lm_head_layernorm.weight": "norms around its projection",
}


@pytest.mark.parametrize("tensor", VARIANTS)
def test_relatives_are_refused_by_name_before_weights_are_loaded(tensor, tmp_path):
    made = specforge(tmp_path)
    made.tensors |= Weights().layer(1, H) | {tensor: torch.zeros(4)}
    with pytest.raises(ConfigError, match=f"SD-E174 .*{VARIANTS[tensor]}.* not implemented") as caught:
        needs(made)
    assert tensor in str(caught.value)


def test_the_retired_layout_of_speculators_is_refused_by_name(tmp_path):
    made = change(safeailab_eagle1(tmp_path), speculators_model_type="eagle")
    assert is_eagle(Checkpoint(tmp_path, made.config))
    with pytest.raises(Refusal, match="retired layout of speculators"):
        needs(made)


def test_rotary_pairs_of_neighbours_are_refused(tmp_path):
    with pytest.raises(Refusal, match="is_neox_style: false"):
        needs(change(safeailab(tmp_path), is_neox_style=False))


@pytest.mark.parametrize("make", [safeailab_eagle1, speculators, peagle], ids=lambda make: make.__name__)
def test_unknown_tensors_are_an_error(make, tmp_path):
    made = make(tmp_path)
    made.tensors["adapter.weight"] = torch.zeros(4)
    with pytest.raises(ConfigError, match=r"SD-E174 (.|\n)*adapter.weight"):
        start(made)


@pytest.mark.parametrize(
    ("make", "tensor"),
    [
        (safeailab_eagle1, "layers.0.post_attention_layernorm.weight"),
        (speculators, "fc.weight"),
        (speculators, "layers.0.hidden_norm.weight"),
        (speculators, "norm.weight"),
        (speculators, "lm_head.weight"),
        (speculators, "d2t"),
        (specforge, "fc_norm.1.weight"),
    ],
)
def test_a_missing_tensor_is_an_error(make, tensor, tmp_path):
    made = make(tmp_path)
    made.tensors.pop(tensor)
    with pytest.raises(ConfigError, match="SD-E172") as caught:
        start(made)
    assert tensor in str(caught.value)


def test_a_stated_bias_that_is_not_there_is_an_error(tmp_path):
    made = change(safeailab_eagle1(tmp_path), bias=True)
    made.tensors.pop("fc.bias")
    with pytest.raises(ConfigError, match=r"SD-E172 (.|\n)*fc.bias \[256\]"):
        start(made)


def test_a_flag_that_contradicts_the_tensors_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"SD-E174 (.|\n)*fc_norm.0.weight"):
        start(change(specforge(tmp_path / "a"), fc_norm=False))
    with pytest.raises(ConfigError, match=r"SD-E172 (.|\n)*input_norm.weight \[768\]"):
        start(change(speculators(tmp_path / "b"), norm_before_fc=True))
    with pytest.raises(ConfigError, match=r"SD-E171 (.|\n)*normed once"):
        needs(change(specforge(tmp_path / "c"), norm_before_fc=True))


def test_misshapen_tensors_are_an_error_with_both_shapes(tmp_path):
    with pytest.raises(ConfigError, match=r"SD-E175 (.|\n)*gate_proj.weight +expected \[90, 256\], found \[96, 256\]"):
        start(change(safeailab(tmp_path), intermediate_size=90))


def test_a_map_that_leaves_the_vocabulary_is_an_error(tmp_path):
    made = safeailab(tmp_path)
    made.tensors["d2t"][-1] = V
    with pytest.raises(ConfigError, match="SD-E173"):
        start(made)


def test_a_narrow_head_beside_the_targets_embedding_has_unequal_halves(tmp_path):
    network = proposer_of(start(narrow(tmp_path))).network
    assert network.layers[0].input_layernorm.weight.shape == (H,)
    assert network.layers[0].hidden_norm.weight.shape == (64,)


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_missing_field_is_an_error_that_names_field_and_file(field, tmp_path):
    with pytest.raises(ConfigError, match=f"SD-E170 .*{field}") as caught:
        needs(change(speculators(tmp_path), **{f"transformer_layer_config.{field}": None}))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_copy_of_the_targets_embedding_is_not_kept(tmp_path):
    copy = speculators(tmp_path / "a")
    copy.tensors["embed_tokens.weight"] = load_file(TINY / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert "embedding.weight" not in proposer_of(start(copy)).network.state_dict()
    own = start(speculators(tmp_path / "b"))
    assert "embedding.weight" in proposer_of(own).network.state_dict()


def test_dense_distributions_are_over_the_draft_vocabulary(tmp_path):
    made = safeailab(tmp_path)
    asked = needs(made, options={"draft_distribution": "dense"}, draft_sample_method="probabilistic")
    ids = torch.arange(640) + made.tensors["d2t"]
    assert asked.draft_vocabulary == tuple(ids.tolist())
    sparse = needs(made, draft_sample_method="probabilistic")
    assert (sparse.draft_vocabulary, sparse.distributions) == (None, ("sparse",))


def test_a_map_of_the_whole_vocabulary_in_another_order_is_declared(tmp_path):
    made = specforge(tmp_path)
    made.tensors["d2t"][:2] = torch.tensor([1, -1])
    asked = needs(made, options={"draft_distribution": "dense"}, draft_sample_method="probabilistic")
    assert asked.draft_vocabulary == (1, 0, *range(2, V))


def test_importing_the_recogniser_loads_no_torch():
    code = "import sys, specdec.plugins.eagle.recognise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("asked", "runs"), [(None, "batched_mm"), ("grouped_mm", "grouped_mm"), ("auto", None)])
def test_experts_of_a_head_run_as_asked_or_as_the_targets(asked, runs, tmp_path):
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": FFN}
    fields = layer_fields(num_hidden_layers=6) | experts
    config = Qwen3MoeConfig(**{name: value for name, value in fields.items() if name != "model_type"})
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "target")
    made = speculators(tmp_path / "head")
    made.config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
    made.config["transformer_layer_config"] |= experts
    weights = Weights()
    for name in ("gate", "up", "down"):
        made.tensors.pop(f"layers.0.mlp.{name}_proj.weight")
    made.tensors |= {
        "layers.0.mlp.gate.weight": weights.matrix(4, H),
        "layers.0.mlp.experts.gate_up_proj": torch.stack([weights.matrix(2 * FFN, H) for _ in range(4)]),
        "layers.0.mlp.experts.down_proj": torch.stack([weights.matrix(H, FFN) for _ in range(4)]),
        "layers.0.self_attn.q_norm.weight": weights.norm(HEAD_DIM),
        "layers.0.self_attn.k_norm.weight": weights.norm(HEAD_DIM),
    }
    speculative = {"method": "eagle3", "model": str(made.save().path), "num_speculative_tokens": 3}
    speculative |= {} if asked is None else {"moe_backend": asked}
    target = {"model": str(tmp_path / "target"), "moe_backend": "batched_mm", "max_model_len": 64}
    llm = LLM(**target, speculative_config=speculative)
    module = proposer_of(llm).network.layers[0].mlp.experts
    default = Qwen3MoeForCausalLM(config).config._experts_implementation
    assert module.config._experts_implementation == (runs or default)
    prompt = [{"prompt_token_ids": list(range(5, 28))}]
    outputs = [each.generate(prompt)[0].outputs[0].token_ids for each in (llm, LLM(**target))]
    assert list(outputs[0])[:8] == list(outputs[1])[:8]
