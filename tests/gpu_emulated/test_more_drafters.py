"""Drafters without a packaged checkpoint: recorded work gives what the same work gives unrecorded.

Their checkpoints are those of `tests/plugins`. What they are asked is that of `test_churn.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import serving
from inside import proposer_of
from safetensors.torch import load_file
from serving import K, churn

from specdec import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
MODULES = (
    "pard_checkpoints",
    "mtp_checkpoints",
    "lora_checkpoints",
    "gemma4_checkpoints",
    "hydra_checkpoints",
    "make_eagle",
    "plugin_helpers",
)
(
    pard_checkpoints,
    mtp_checkpoints,
    lora_checkpoints,
    gemma4_checkpoints,
    hydra_checkpoints,
    make_eagle,
    plugin_helpers,
) = map(importlib.import_module, MODULES)
sys.path.pop(0)
PROMPT = list(range(20, 32))


def several_modules(path: Path) -> tuple[str, dict[str, Any]]:
    modules = mtp_checkpoints.Several([mtp_checkpoints.tiny_module(seed=seed) for seed in range(K)])
    target = mtp_checkpoints.tiny_target(path / "target", modules.tensors(mtp_checkpoints.NEXTN, 8))
    return str(target), {"method": "mtp"}


def checkpoint(make: Callable[[Path], Any], method: str) -> Callable[[Path], tuple[str, dict[str, Any]]]:
    return lambda path: ("tiny", {"method": method, "model": str(make(path / "draft").save().path)})


MADE = {
    "pard": checkpoint(pard_checkpoints.pard, "draft_model"),
    "mtp-modules": several_modules,
    "uno": lambda path: (
        "tiny",
        {
            "method": "specdec.plugins.uno.proposer:UnoProposer",
            "model": str(lora_checkpoints.lora().save(path / "draft")),
        },
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("form", ["greedy", "sparse"])
@pytest.mark.parametrize("name", MADE)
def test_recorded_work_gives_what_it_gives_unrecorded(name, form, cuda, tmp_path):
    model, speculative = MADE[name](tmp_path)
    speculative |= {"num_speculative_tokens": K}
    if form != "greedy":
        speculative |= {"draft_sample_method": "probabilistic", "proposer_config": {"draft_distribution": form}}
    found = []
    for graphs in (True, False):
        settings = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 3, "num_kv_blocks": 6}
        llm = LLM(model, speculative_config=speculative, cuda_graphs=graphs, **settings)
        found.append(churn(llm, 4))
        assert not llm.engine.metrics.proposer_errors
        assert llm.engine.metrics.counts["num_preemptions"] > 0
    assert found[0] == found[1]


def at(method: str, model: Path, **more: Any) -> dict[str, Any]:
    return {"method": method, "model": str(model), **more}


def assistant(path: Path) -> tuple[str, dict[str, Any]]:
    """Gemma 4's, whose attention reads the target's keys and values."""
    target = gemma4_checkpoints.make_target()
    texts = [gemma4_checkpoints.generate(target, PROMPT, 24)]
    made = gemma4_checkpoints.make_assistant(target, texts, ordered=False)
    target.save_pretrained(path / "target")
    made.save_pretrained(path / "assistant")
    return str(path / "target"), at("gemma4_assistant", path / "assistant")


def hydra(path: Path) -> tuple[str, dict[str, Any]]:
    made = hydra_checkpoints.hydra(plugin_helpers.TargetStates(), [list(range(100, 130))])
    return "tiny", at("hydra", made.save(path / "draft"))


LAYER_SKIP = {"method": "layer_skip", "proposer_config": {"exit_layer": 6}}
COMPARED: dict[str, Callable[[Path], tuple[str, dict[str, Any]]]] = {
    "pard2": checkpoint(pard_checkpoints.pard2, "draft_model"),
    "eagle3-mla": checkpoint(make_eagle.latent, "eagle3"),
    "hydra": hydra,
    "target_kv": assistant,
    "target_layers": lambda path: ("tiny", LAYER_SKIP),
    "tree": lambda path: ("tiny", serving.DEVICE["eagle3"] | {"max_nodes": 6}),
}


def drafts(model: str, speculative: dict[str, Any], device: str, *, sampled: bool) -> list[tuple[int, ...]]:
    """Everything that was drafted and generated for one prompt."""
    method = {"draft_sample_method": "probabilistic"} if sampled else {}
    speculative = speculative | {"num_speculative_tokens": K} | method
    llm = LLM(model, speculative_config=speculative, device=device, dtype="float32", max_model_len=64, max_num_seqs=1)
    params = SamplingParams(temperature=0.8 * sampled, seed=3, max_tokens=6, ignore_eos=True)
    updates = llm.stream([{"prompt_token_ids": PROMPT}], params)
    found = [(*update.draft_token_ids, *update.token_ids) for update in updates]
    assert not llm.engine.metrics.proposer_errors
    return found


@pytest.mark.full
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", COMPARED)
def test_a_device_drafts_what_a_cpu_does(name, sampled, cuda, tmp_path):
    """By recorded passes there."""
    model, speculative = COMPARED[name](tmp_path)
    found = drafts(model, speculative, "cuda", sampled=sampled)
    assert found == drafts(model, speculative, "cpu", sampled=sampled)
    assert sum(map(len, found)) > 6, "it drafts"


def test_new_weights_leave_nothing_on_the_device_beside_the_network(cuda):
    stored = load_file(serving.TINY / "medusa" / "model.safetensors")
    settings = {"device": "cuda", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 1, "cuda_graphs": False}
    with LLM("tiny", speculative_config=serving.DEVICE["medusa"], **settings) as llm:
        llm.update_proposer_weights({name: each.to("cuda") for name, each in stored.items()})
        proposer = proposer_of(llm)
        assert all(each.is_cpu for each in proposer._updates.values())
        assert not any(each.is_cpu for each in proposer.network.parameters())
