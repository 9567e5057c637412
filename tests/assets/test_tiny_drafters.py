"""The shipped drafters: tensors and configs as published ones have them, and drafts that their targets accept."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import specdec

ROOT = Path(__file__).resolve().parents[2]
ASSETS = (Path(specdec.__file__).parent / "assets").resolve()
TINY = ASSETS / "tiny"
VOCAB_SIZE, DRAFT_VOCAB_SIZE, HIDDEN, FFN, EAGLE3_FFN = 4096, 2048, 256, 640, 768
DSPARK_FFN, MARKOV_RANK = 256, 16
MASK_TOKEN_ID = 4084
MAX_ASSET_BYTES = 55_000_000
PROMPT_LENGTH = 48  # tokens
NUM_DRAFTS = 7

WEIGHTS = {
    "draft": "draft/model.safetensors",
    "pard": "pard/model.safetensors",
    "eagle": "eagle/model.safetensors",
    "eagle3": "eagle3/model.safetensors",
    "dflash": "dflash/model.safetensors",
    "dspark": "dspark/model.safetensors",
    "medusa": "medusa/model.safetensors",
    "mtp": "target/mtp.safetensors",
    "moe": "moe/model.safetensors",
    "moe_draft": "moe_draft/model.safetensors",
}


def attention_shapes(prefix, in_features=HIDDEN, *, qk_norm):
    projections = {
        f"{prefix}.self_attn.q_proj.weight": (256, in_features),
        f"{prefix}.self_attn.k_proj.weight": (128, in_features),
        f"{prefix}.self_attn.v_proj.weight": (128, in_features),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, 256),
    }
    norms = {f"{prefix}.self_attn.{name}_norm.weight": (64,) for name in "qk"} if qk_norm else {}
    return projections | norms


def mlp_shapes(prefix, ffn=FFN):
    return {
        f"{prefix}.mlp.gate_proj.weight": (ffn, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (ffn, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, ffn),
    }


def norm_shapes(prefix, *names):
    return {f"{prefix}.{name}.weight": (HIDDEN,) for name in names}


def qwen3_layer_shapes(prefix, ffn=FFN):
    norms = norm_shapes(prefix, "input_layernorm", "post_attention_layernorm")
    return attention_shapes(prefix, qk_norm=True) | mlp_shapes(prefix, ffn) | norms


BLOCK_INPUTS = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}


SHAPES = {
    "eagle3": {
        "embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB_SIZE, HIDDEN),
        "d2t": (DRAFT_VOCAB_SIZE,),
        "t2d": (VOCAB_SIZE,),
    }
    | attention_shapes("layers.0", 2 * HIDDEN, qk_norm=False)
    | mlp_shapes("layers.0", EAGLE3_FFN)
    | norm_shapes("layers.0", "input_layernorm", "hidden_norm", "post_attention_layernorm"),
    "eagle": {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    | attention_shapes("layers.0", qk_norm=False)
    | mlp_shapes("layers.0")
    | norm_shapes("layers.0", "post_attention_layernorm"),
    "dflash": BLOCK_INPUTS | qwen3_layer_shapes("layers.0") | qwen3_layer_shapes("layers.1"),
    "dspark": BLOCK_INPUTS
    | qwen3_layer_shapes("layers.0", DSPARK_FFN)
    | {
        "markov_head.markov_w1.weight": (VOCAB_SIZE, MARKOV_RANK),
        "markov_head.markov_w2.weight": (VOCAB_SIZE, MARKOV_RANK),
        "confidence_head.proj.weight": (1, HIDDEN + MARKOV_RANK),
        "confidence_head.proj.bias": (1,),
    },
    "medusa": {"token_map": (DRAFT_VOCAB_SIZE,)}
    | {f"blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN) for head in range(3)}
    | {f"lm_heads.{head}.weight": (DRAFT_VOCAB_SIZE, HIDDEN) for head in range(3)},
    "mtp": {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}
    | norm_shapes("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    | qwen3_layer_shapes("mtp.layers.0"),
}


def tensors_of(name):
    return load_file(TINY / WEIGHTS[name])


def config_of(folder):
    return json.loads((TINY / folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def check():
    """The module that measures the checkpoints; `scripts` is not part of the installed package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("scripts.check_tiny_drafters")


@pytest.fixture(scope="module")
def chunks():
    """Every whole chunk of `PROMPT_LENGTH` tokens of the shipped prompts, [B, PROMPT_LENGTH]."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)
    lines = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [torch.tensor(tokenizer(json.loads(line)["prompt"])["input_ids"]) for line in lines]
    pieces = [piece for prompt in ids for piece in prompt.split(PROMPT_LENGTH)]
    return torch.stack([piece for piece in pieces if len(piece) == PROMPT_LENGTH])


@pytest.fixture(scope="module")
def first_rounds_of(check, chunks):
    """By target folder: the frozen target and the first rounds after the chunks."""

    @cache
    def measure(name):
        target = check.FrozenTarget(TINY / name, torch.float32)
        return target, check.first_rounds(target, chunks, NUM_DRAFTS)

    return measure


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_have_the_published_names_and_shapes(name):
    assert {key: tuple(tensor.shape) for key, tensor in tensors_of(name).items()} == SHAPES[name]


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_finite_bf16_and_id_maps_integers(name):
    dtypes = {"d2t": torch.int64, "t2d": torch.bool, "token_map": torch.int64}
    for key, tensor in tensors_of(name).items():
        assert tensor.dtype == dtypes.get(key, torch.bfloat16), key
        assert tensor.isfinite().all(), key


def test_eagle3_id_maps_name_the_same_tokens():
    tensors = tensors_of("eagle3")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    chosen = torch.arange(DRAFT_VOCAB_SIZE) + d2t
    assert torch.equal(t2d.nonzero().flatten(), chosen)
    assert d2t.unique().numel() > 100  # offsets of a draft vocabulary with many gaps
    embedding = tensors["embed_tokens.weight"]
    assert torch.equal(embedding, load_file(TINY / "target/model.safetensors")["model.embed_tokens.weight"])
    assert torch.equal(tensors["lm_head.weight"], embedding[chosen])  # the tied target's head, sliced


def test_medusa_token_map_holds_absolute_ids():
    token_map = tensors_of("medusa")["token_map"]
    assert (token_map.diff() > 0).all()
    assert token_map.min() >= 0
    assert DRAFT_VOCAB_SIZE < token_map.max() < VOCAB_SIZE


def test_eagle3_config_is_the_speculators_one():
    config = config_of("eagle3")
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is True
    assert not any(config[flag] for flag in ("norm_before_fc", "fc_norm", "norm_output"))
    assert config["draft_vocab_size"] == DRAFT_VOCAB_SIZE
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("llama", 1)
    assert (layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]) == (HIDDEN, EAGLE3_FFN, 64)
    assert (layer["num_attention_heads"], layer["num_key_value_heads"]) == (4, 2)
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]


def test_dflash_config_is_the_speculators_one():
    config = config_of("dflash")
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dflash"
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["block_size"], config["mask_token_id"]) == (8, MASK_TOKEN_ID)
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["draft_vocab_size"] == VOCAB_SIZE
    assert config["sample_from_anchor"] is False
    assert config["sliding_window_non_causal"] is True  # some readers take false to mean causal blocks
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("qwen3", 2)
    assert layer["layer_types"] == ["full_attention"] * 2


def test_dspark_config_is_the_speculators_one():
    config = config_of("dspark")
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dspark"
    assert config["architectures"] == ["DSparkDraftModel"]
    assert (config["block_size"], config["mask_token_id"]) == (7, MASK_TOKEN_ID)
    assert config["sample_from_anchor"] is True  # the anchor's slot drafts as well
    assert (config["markov_head_type"], config["markov_rank"]) == ("vanilla", MARKOV_RANK)
    assert config["enable_confidence_head"] is config["confidence_head_with_markov"] is True
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7


def test_eagle_config_is_a_one_layer_llama():
    config = config_of("eagle")
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (1, HIDDEN, VOCAB_SIZE)
    assert config["bias"] is True
    assert config["rope_theta"] == 10_000.0


def test_medusa_config_is_the_vllm_one():
    config = config_of("medusa")
    assert (config["architectures"], config["model_type"]) == (["MedusaModel"], "medusa")
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, 1)
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (VOCAB_SIZE, DRAFT_VOCAB_SIZE)
    assert not any(config[flag] for flag in ("medusa_fc_bias", "original_lm_head"))


def test_mtp_module_does_not_disturb_loading_the_target(capfd):
    assert config_of("target")["mtp_num_hidden_layers"] == 1
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            TINY / "target", local_files_only=True, output_loading_info=True
        )
    finally:
        logging.enable_progress_bar()
    assert model.num_parameters() == 6_558_976
    assert not any(report.values())
    assert capfd.readouterr() == ("", "")


def test_mixtures_have_experts_and_publish_them_one_by_one():
    for name, num_experts in (("moe", 8), ("moe_draft", 4)):
        config = AutoConfig.from_pretrained(TINY / name, local_files_only=True)
        assert config.model_type == "qwen3_moe"
        assert (config.num_experts, config.num_experts_per_tok) == (num_experts, 2)
        shape = (config.moe_intermediate_size, config.hidden_size)
        tensors = tensors_of(name)
        for layer in range(config.num_hidden_layers):
            assert tensors[f"model.layers.{layer}.mlp.gate.weight"].shape == (num_experts, config.hidden_size)
            for expert in range(num_experts):
                assert tensors[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"].shape == shape


@pytest.mark.parametrize("name", ["draft", "pard", "moe", "moe_draft"])
def test_language_models_share_the_targets_tokenizer(name):
    for file_name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TINY / name / file_name).read_bytes() == (TINY / "target" / file_name).read_bytes()
    assert config_of(name)["vocab_size"] == VOCAB_SIZE


def test_pard_is_the_draft_model_with_a_mask():
    assert config_of("pard") == config_of("draft") | {"pard_token": MASK_TOKEN_ID}


FEWEST_TOKENS_PER_VERIFY = {
    "draft": 2.9,
    "pard": 1.8,
    "eagle3": 2.7,
    "eagle": 2.5,
    "mtp": 2.4,
    "dflash": 1.8,
    "dspark": 1.8,
    "medusa": 1.2,
    "hybrid_mtp": 2.4,
    "moe_draft": 1.3,
}


@pytest.mark.parametrize(("name", "fewest"), FEWEST_TOKENS_PER_VERIFY.items())
def test_first_drafts_are_accepted(name, fewest, check, first_rounds_of):
    (drafter,) = (drafter for drafter in check.DRAFTERS if drafter.name == name)
    target, rounds = first_rounds_of(drafter.target)
    drafts = drafter.load(TINY / drafter.weights, target)(rounds, NUM_DRAFTS)
    assert check.acceptance(rounds, drafts).tokens_per_verify > fewest


def test_drafts_of_an_untrained_head_are_not_accepted(check, first_rounds_of):
    target, rounds = first_rounds_of("target")
    torch.manual_seed(0)
    draft = check.RowDrafts(check.eagle.Eagle(target.embedding, target.unembedding))
    assert check.acceptance(rounds, draft(rounds, NUM_DRAFTS)).tokens_per_verify < 1.2


@pytest.mark.parametrize("name", ["eagle3", "eagle", "mtp"])
def test_unrolled_training_rows_equal_drafting_rows(name, check, first_rounds_of):
    unroll = importlib.import_module("scripts.drafters.unroll")
    target, rounds = first_rounds_of("target")
    (drafter,) = (drafter for drafter in check.DRAFTERS if drafter.name == name)
    head = drafter.load(TINY / drafter.weights, target).head
    tokens, features = rounds.next_tokens[:4], head.features(rounds.observation)[:4]
    begun, steps = 20, 4  # a draft from the first 20 rows, its later tokens given by the text
    memory, states = unroll.CausalMemory(), head.first_states(features[:, :begun])
    drafted, positions, row_tokens = [], torch.arange(begun), tokens[:, :begun]
    for step in range(steps):
        logits, states = head(row_tokens, states, positions, memory)
        drafted.append(logits[:, -1])
        states, positions = states[:, -1:], torch.tensor([begun + step])
        row_tokens = tokens[:, begun + step, None]
    memory, states = unroll.UnrolledMemory(), head.first_states(features)
    for step in range(steps):
        logits, states = head(tokens, states, torch.arange(PROMPT_LENGTH), memory)
        torch.testing.assert_close(logits[:, begun - 1 + step], drafted[step], rtol=1e-4, atol=1e-4)
        states = torch.cat([states[:, :1], states[:, :-1]], dim=1)


def test_card_quotes_the_recorded_figures():
    record = json.loads((TINY / "drafters.json").read_text(encoding="utf-8"))
    card = (TINY / "README.md").read_text(encoding="utf-8")
    assert set(record["drafters"]) == set(FEWEST_TOKENS_PER_VERIFY)
    for name, figures in record["drafters"].items():
        row = next(line for line in card.splitlines() if line.startswith(f"| `{name}`"))
        assert f"{figures['first_round']['tokens_per_verify']:.2f}" in row
        assert f"{figures['parameters']:,}" in row
    assert f"{record['held_out_nats_per_token']['moe']:.2f}" in card


def test_all_assets_fit_the_size_budget():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= MAX_ASSET_BYTES
