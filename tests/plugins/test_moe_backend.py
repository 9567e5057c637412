"""Which experts function really runs in the target and in the drafter: the setting of each, and what it defaults to."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from inside import proposer_of, target_of
from medusa_checkpoints import Heads, save_vllm
from mtp_checkpoints import SMALL_V, moe_config, random_model
from plugin_helpers import GREEDY
from safetensors.torch import load_file, save_file
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec import LLM
from specdec.sdk import ConfigError

DEFAULT = "grouped_mm"  # of transformers
TARGETS = "batched_mm"
SETTINGS = {"override": ("eager", "eager"), "inherit": (None, TARGETS), "auto": ("auto", DEFAULT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with experts, an MTP module with experts in it, and drafters of three more families for it."""
    folder = tmp_path_factory.mktemp("moe")
    random_model(moe_config("qwen3_moe"), 1).save_pretrained(folder / "target")
    random_model(moe_config("qwen3_moe", num_hidden_layers=1), 2).save_pretrained(folder / "one_layer")
    layer = {
        name.removeprefix("model.layers.0."): tensor
        for name, tensor in load_file(folder / "one_layer" / "model.safetensors").items()
        if name.startswith("model.layers.0.")
    }
    save_mtp(folder / "target", layer)
    save_eagle3(folder / "eagle3", layer)
    matrices = [torch.randn(64, 64) * 0.05 for _ in range(3)]
    heads = Heads([[(matrix, None)] for matrix in matrices], [torch.randn(SMALL_V, 64) for _ in range(3)])
    save_vllm(folder / "medusa", heads)
    config = json.loads((folder / "medusa" / "config.json").read_text())
    (folder / "medusa" / "config.json").write_text(json.dumps(config | {"vocab_size": SMALL_V}))
    return folder


def save_mtp(path: Path, layer: dict[str, torch.Tensor]) -> None:
    tensors = {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors["mtp.fc.weight"] = torch.randn(64, 128) * 0.1
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = torch.ones(64)
    save_file(tensors, path / "mtp.safetensors")


def save_eagle3(path: Path, layer: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        own = tensors[f"layers.0.self_attn.{name}.weight"]
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.cat([own, own], dim=1)
    tensors |= {"layers.0.hidden_norm.weight": torch.ones(64), "norm.weight": torch.ones(64)}
    tensors["fc.weight"] = torch.randn(64, 192) * 0.1
    save_file(tensors, path / "model.safetensors")
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": SMALL_V,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": moe_config("qwen3_moe", num_hidden_layers=1).to_dict(),
    }
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def ran(monkeypatch):
    """Names of the experts functions that ran, by experts module; "eager" stands for a module's own forward."""
    seen: dict[torch.nn.Module, set[str]] = defaultdict(set)
    called: set[torch.nn.Module] = set()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: called.add(module))
    for name in (TARGETS, DEFAULT):
        function = ALL_EXPERTS_FUNCTIONS[name]

        def spy(module, *args, _function=function, _name=name, **kwargs):
            seen[module].add(_name)
            return _function(module, *args, **kwargs)

        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, name, spy)

    def names(network):
        experts = [module for name, module in network.named_modules() if name.endswith("mlp.experts")]
        assert called.issuperset(experts)
        return {name for module in experts for name in (seen[module] or {"eager"})}

    yield names
    hook.remove()


def drafter(method: str, folder: Path) -> dict[str, object]:
    model = {"draft_model": folder / "target", "mtp": None}.get(method, folder / method)
    return {"method": method, "num_speculative_tokens": 3} | ({"model": str(model)} if model else {})


def run(folder, method, moe_backend):
    config = drafter(method, folder) | {"moe_backend": moe_backend}
    llm = LLM(folder / "target", moe_backend=TARGETS, speculative_config=config, max_model_len=128)
    prompts = [[(7 * i + j) % SMALL_V for i in range(9 + j)] for j in range(2)]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY.replace(max_tokens=6, detokenize=False))
    assert llm.engine.metrics.counts["proposer_propose_calls"] > 0
    return llm


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_experts_of_the_drafter_run_as_it_says_and_those_of_the_target_as_that_says(method, setting, folder, ran):
    asked, expected = SETTINGS[setting]
    llm = run(folder, method, asked)
    proposer = proposer_of(llm)
    network = proposer._model if method == "draft_model" else proposer.network
    assert ran(network) == {expected}
    assert ran(target_of(llm).model) == {TARGETS}


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafter_without_experts_leaves_those_of_the_target_alone(setting, folder, ran):
    llm = run(folder, "medusa", SETTINGS[setting][0])
    assert ran(proposer_of(llm).network) == set()
    assert ran(target_of(llm).model) == {TARGETS}


@pytest.mark.parametrize("where", ["target", "drafter"])
def test_unknown_experts_implementation_is_refused_with_those_there_are(where, folder):
    config = drafter("medusa", folder) | {"moe_backend": "grouped" if where == "drafter" else None}
    with pytest.raises(ConfigError, match=r"SD-E132(.|\n)*'grouped'(.|\n)*batched_mm(.|\n)*grouped_mm"):
        LLM(folder / "target", moe_backend="grouped" if where == "target" else None, speculative_config=config)
