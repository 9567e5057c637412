"""Which checkpoints the mtp proposer takes, and what it says of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from inside import proposer_of
from mtp_checkpoints import ERNIE, MIMO, NEXTN, QWEN, SPECULATORS, tiny_module, tiny_target
from plugin_helpers import TINY
from replaying import speculate
from safetensors.torch import load_file, save_file

from specdec.plugins.mtp.checkpoint import module_layers
from specdec.plugins.mtp.layouts import find_modules
from specdec.plugins.mtp.recognise import is_mtp
from specdec.sdk import Refusal, SpecdecError
from specdec.sdk.checkpoint import Checkpoint

N = 8


def engine(directory: Path, **speculative):
    return speculate(directory, "mtp", 2, speculative=speculative, max_model_len=64)


def head(directory: Path, tensors: dict, **config) -> Path:
    """A directory with a module alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_target_without_a_module_is_refused_with_where_it_looked(tmp_path):
    path = tiny_target(tmp_path / "target", None)
    with pytest.raises(Refusal) as refusal:
        engine(path)
    message = str(refusal.value)
    assert f"{str(path)!r} has no multi-token-prediction weights" in message
    for looked_for in ("model.layers.*.eh_proj", "model.mtp_layers.*.input_proj", "mtp.fc", "in model.safetensors"):
        assert looked_for in message
    assert "90 tensors" in message


@pytest.mark.parametrize(
    ("name", "layout", "why"),
    [
        ("model.mtp.layers.0.eh_proj.weight", "MiMo-V2", "parts that no type of layer"),
        ("model.layers.9.transformer.self_attn.q_proj.weight", "Step-3.5", "readers disagree"),
        ("language_model.model.mtp.layers.0.transformer_layer.self_attn.q_proj.weight", "MiniMax-M3", "norms add one"),
        ("model.mtp.layers.0.input_proj.weight", "Inkling", "behind a norm of the target"),
        ("mtp.layers.0.eh_proj.weight", "Nemotron-H", "several layers"),
        ("pre_projection.weight", "Gemma-4 assistant", "gemma4_assistant. runs it"),
        ("mtp.0.e_proj.weight", "DeepSeek-V4", "hyper-connections"),
    ],
)
def test_a_layout_that_is_not_implemented_is_refused_by_name_and_reason(name, layout, why, tmp_path):
    path = tiny_target(tmp_path / "target", {name: torch.zeros(2, 2)})
    with pytest.raises(Refusal, match=f"(?s)the layout {layout}.* is not implemented: .*{why}.*DeepSeek, MiMo, Qwen"):
        engine(path)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_packed"])
def test_a_quantised_module_is_refused(suffix, tmp_path):
    tensors = tiny_module().tensors(NEXTN, N) | {f"model.layers.{N}.mlp.up_proj.{suffix}": torch.zeros(2, 2)}
    with pytest.raises(Refusal, match=rf"stored quantised \(model\.layers\.{N}\.mlp\.up_proj\.{suffix}\)"):
        engine(tiny_target(tmp_path / "target", tensors))


def test_a_module_of_another_width_is_refused_with_the_numbers(tmp_path):
    norm = {"mtp.layers.0.input_layernorm.weight": torch.zeros(128)}
    path = head(tmp_path, {"mtp.fc.weight": torch.zeros(128, 256)} | norm)
    with pytest.raises(Refusal, match="hidden size is 128, and this target's is 256"):
        speculate("tiny", "mtp", 2, speculative={"model": str(path)})


def test_a_head_for_another_vocabulary_is_refused_with_the_numbers(tmp_path):
    config = {"model_type": "qwen3", "vocab_size": 151936}
    tensors = tiny_module().tensors(SPECULATORS, 0)
    path = head(tmp_path, tensors, speculators_model_type="mtp", transformer_layer_config=config)
    with pytest.raises(Refusal, match="vocabulary is 151936, and this target's is 4096"):
        speculate("tiny", "mtp", 2, speculative={"model": str(path)})


BROKEN = {
    "projection": (lambda t: t.update({"mtp.fc.weight": torch.zeros(256, 300)}), "SD-E175", r"found +\[256, 300\]"),
    "no_norm": (lambda t: t.pop("mtp.norm.weight"), "SD-E172", r"final_norm\.weight"),
    "no_layer_tensor": (lambda t: t.pop("mtp.layers.0.mlp.up_proj.weight"), "SD-E172", r"layer\.mlp\.up_proj\.weight"),
    "misshapen": (
        lambda t: t.update({"mtp.layers.0.self_attn.o_proj.weight": torch.zeros(256, 8)}),
        "SD-E175",
        r"expected \[256, 256\], found \[256, 8\]",
    ),
    "unknown": (lambda t: t.update({"mtp.gate.weight": torch.zeros(1)}), "SD-E174", r"mtp\.gate\.weight"),
    "unknown_in_layer": (
        lambda t: t.update({"mtp.layers.0.self_attn.sinks": torch.zeros(1)}),
        "SD-E174",
        r"layer\.self_attn\.sinks",
    ),
    "short_head": (lambda t: t.update({"mtp.lm_head.weight": torch.zeros(9, 256)}), "SD-E175", r"found \[9, 256\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_is_an_error_that_names_the_tensor(name, tmp_path):
    change, code, message = BROKEN[name]
    tensors = tiny_module().tensors(QWEN, 0)
    change(tensors)
    with pytest.raises(SpecdecError, match=message) as error:
        engine(tiny_target(tmp_path / "target", tensors))
    assert code in str(error.value)


def test_an_incomplete_set_of_experts_is_an_error(tmp_path):
    tensors = tiny_module().tensors(QWEN, 0) | {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(SpecdecError, match=r"layer\.mlp\.experts\.0\.up_proj\.weight"):
        engine(tiny_target(tmp_path / "target", tensors))


def test_a_truncated_file_is_an_error(tmp_path):
    path = tiny_target(tmp_path / "target", tiny_module().tensors(QWEN, 0))
    whole = (path / "mtp.safetensors").read_bytes()
    (path / "mtp.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpecdecError, match="SD-E146"):
        engine(path)


def test_the_module_may_lie_in_another_directory_than_the_target(tmp_path):
    path = head(tmp_path, tiny_module().tensors(NEXTN, N), num_nextn_predict_layers=1)
    llm = speculate("tiny", "mtp", 2, speculative={"model": str(path)}, max_model_len=64)
    assert proposer_of(llm).network.layer.self_attn.layer_idx == 0


def test_the_module_reads_the_targets_embedding_and_head_where_it_stores_equal_ones(tmp_path):
    module = tiny_module()
    module.parts["embed"] = load_file(TINY / "target" / "model.safetensors")["model.embed_tokens.weight"]
    llm = engine(tiny_target(tmp_path / "target", module.tensors(NEXTN, N)))
    own = {name.partition(".")[0] for name, _ in proposer_of(llm).network.named_parameters()}
    assert own == {"embedding_norm", "hidden_norm", "projection", "layer", "final_norm"}


@pytest.mark.parametrize(
    ("layout", "index"),
    [(NEXTN, 61), (MIMO, 0), (QWEN, 0), (ERNIE, 0), (SPECULATORS, 0)],
    ids=lambda each: str(each)[:9],
)
def test_layouts_are_told_apart_by_the_projections_name(layout, index):
    names = ["model.layers.0.mlp.up_proj.weight", layout["proj"].replace("{i}", str(index)) + ".weight"]
    layer = layout["layer"].replace("{i}", str(index)) + "mlp.up_proj.weight"
    found = find_modules([*names, layer])
    assert found is not None
    assert (found[0].prefix + found[0].parts["projection"]).format(index=index) + ".weight" == names[1]
    assert found[1] == [index]


def test_modules_are_counted_by_their_projections():
    found = find_modules([f"model.layers.{index}.eh_proj.weight" for index in (12, 9, 10)])
    assert found is not None
    assert found[1] == [9, 10, 12]


def test_modules_with_one_projection_are_counted_by_their_layers():
    found = find_modules(["mtp.fc.weight", "mtp.layers.1.input_layernorm.weight", "mtp.layers.0.mlp.up_proj.weight"])
    assert found is not None
    assert found[1] == [0, 1]


def test_the_layer_is_a_full_attention_layer_with_or_without_experts():
    config = {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }
    common = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    sparse, dense = module_layers(config, sparse=[True]), module_layers(config, sparse=[False])
    assert sparse == common | {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
    assert dense == common | {"first_k_dense_replace": 1, "mlp_layer_types": ["dense"]}


def test_a_whole_model_with_a_module_inside_is_not_claimed(tmp_path):
    path = tiny_target(tmp_path / "target", tiny_module().tensors(QWEN, 0), mtp_num_hidden_layers=1)
    assert not is_mtp(Checkpoint.open(path))


def test_a_module_alone_and_a_speculators_head_are_claimed(tmp_path):
    tensors = tiny_module().tensors(QWEN, 0)
    assert is_mtp(Checkpoint.open(head(tmp_path / "alone", tensors, mtp_num_hidden_layers=1)))
    assert is_mtp(Checkpoint.open(head(tmp_path / "spec", tensors, speculators_model_type="mtp")))


@pytest.mark.parametrize(
    "config",
    [
        {"speculators_model_type": "eagle3", "num_nextn_predict_layers": 1},
        {"model_type": "llama"},
        {"model_type": "medusa"},
        {"medusa_num_heads": 5},
        {"dflash_config": {}},
    ],
    ids=str,
)
def test_checkpoints_of_other_families_are_not_claimed(config, tmp_path):
    assert not is_mtp(Checkpoint.open(head(tmp_path, {"fc.weight": torch.zeros(2, 4)}, **config)))
