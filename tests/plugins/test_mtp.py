"""Multi-token prediction: modules in every layout draft what the format says, and nothing else changes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import facts
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import proposer_of
from mtp_checkpoints import (
    ERNIE,
    MIMO,
    NEXTN,
    QWEN,
    SPECULATORS,
    Module,
    V,
    fitted_module,
    moe_module,
    moe_target,
    packaged_module,
    tiny_module,
    tiny_target,
)
from plain_text import PlainText
from plugin_helpers import TINY, TargetStates
from replaying import ROOMS, assert_replayed, continued, speculate, tiny_prompts, tiny_truth
from safetensors.torch import save_file
from sweeps import slow_unless

from specdec import LLM

pytestmark = pytest.mark.slow

N = 8


@pytest.fixture(scope="module")
def module(target) -> Module:
    return fitted_module(target, tiny_truth()[3:9])


@pytest.fixture(scope="module")
def directory(module, tmp_path_factory) -> Path:
    tensors = module.tensors(QWEN, 0)
    return tiny_target(tmp_path_factory.mktemp("mtp") / "target", tensors, mtp_num_hidden_layers=1)


def engine(directory: Path, k: int, *, method: str = "mtp", **others) -> LLM:
    return speculate(directory, method, k, **others)


def with_own_tables(module: Module) -> Module:
    """Its own embedding and head."""
    generator = torch.Generator().manual_seed(7)
    for name in ("embed", "head"):
        module.parts[name] = torch.randn(V, 256, generator=generator)
    return module


def without_final_norm(module: Module) -> Module:
    del module.parts["norm"]
    return module


# layout, number of the module, module
LAYOUTS = {
    "qwen": lambda: (QWEN, 0, tiny_module()),
    "deepseek": lambda: (NEXTN, N, tiny_module()),
    "deepseek_own_tables": lambda: (NEXTN, N, with_own_tables(tiny_module())),
    "mimo": lambda: (MIMO, 0, tiny_module(hidden_first=True)),
    "ernie": lambda: (ERNIE, 0, without_final_norm(tiny_module(recycles_normed=False))),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_of_every_layout_are_those_of_a_replay(name, target, tmp_path):
    layout, index, module = LAYOUTS[name]()
    path = tiny_target(tmp_path / "target", module.tensors(layout, index))
    facts.replayed(engine(path, 4), module.draft(target), 1, 4, every=4)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_longest_drafts_of_every_layout_are_those_of_a_replay(name, target, tmp_path):
    layout, index, module = LAYOUTS[name]()
    llm = engine(tiny_target(tmp_path / "target", module.tensors(layout, index)), 8)
    for place in (0, 7, 15):
        facts.replayed(llm, module.draft(target), place, 8, every=3)


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_drafts_and_accepted_counts_are_those_of_a_replay(k, directory, module, target):
    accepted = facts.replayed(engine(directory, k), module.draft(target), 5, k)
    assert accepted > 0, "agreement on drafts that are all rejected would show little"


def test_the_packaged_module_drafts_as_a_replay_does(target):
    if not (TINY / "target" / "mtp.safetensors").is_file():
        pytest.skip("assets/tiny/target has no module")
    llm = speculate("tiny", "mtp", 5)
    assert sum(facts.replayed(llm, packaged_module().draft(target), index, 5) for index in (3, 4, 5)) > 0


@pytest.mark.parametrize(("layout", "first"), [(QWEN, 0), (NEXTN, N), (MIMO, 0)], ids=["qwen", "deepseek", "mimo"])
def test_the_first_of_several_modules_drafts_every_token_where_that_is_asked_for(layout, first, target, tmp_path):
    """Modules that share a projection have no way of drafting together: the first is used without being asked for."""
    module = tiny_module(hidden_first=layout is MIMO)
    tensors = tiny_module(seed=1).tensors(layout, first + 1) | module.tensors(layout, first)
    speculative = {} if layout is QWEN else {"proposer_config": {"num_modules": 1}}
    llm = engine(tiny_target(tmp_path / "target", tensors), 3, speculative=speculative)
    facts.replayed(llm, module.draft(target), 1, 3, every=4)


def speculators_head(directory: Path, module: Module, layer_config: dict, **changes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    verifier = {"name_or_path": str(TINY / "target"), "architectures": []}
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer_config,
        "speculators_config": {
            "algorithm": "mtp",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": verifier,
        },
    }
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(module.tensors(SPECULATORS, 0), directory / "model.safetensors")
    return directory


def tiny_config(**changes) -> dict:
    return json.loads((TINY / "target" / "config.json").read_text()) | changes


@pytest.mark.parametrize("tables", [False, True], ids=["the_targets_tables", "own_tables"])
def test_an_extracted_head_says_itself_what_it_is_and_drafts_as_a_replay_does(tables, target, tmp_path):
    module = with_own_tables(tiny_module()) if tables else tiny_module()
    path = speculators_head(tmp_path, module, tiny_config())
    llm = LLM("tiny", speculative_config={"model": str(path), "num_speculative_tokens": 3}, max_model_len=256)
    facts.replayed(llm, module.draft(target), 1, 3, every=4)


def test_an_extracted_head_starts_its_target(tmp_path):
    path = speculators_head(tmp_path, tiny_module(), tiny_config())
    llm = LLM(str(path), max_model_len=128)
    assert proposer_of(llm).config.num_draft_tokens == 3


def test_a_module_alone_in_a_directory_is_recognised(target, tmp_path):
    module = tiny_module()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "mtp_num_hidden_layers": 1}))
    save_file(module.tensors(QWEN, 0), tmp_path / "model.safetensors")
    llm = LLM("tiny", speculative_config={"model": str(tmp_path), "num_speculative_tokens": 3}, max_model_len=256)
    facts.replayed(llm, module.draft(target), 1, 3, every=4)


FAMILIES = {
    "deepseek_v3": (NEXTN, 2, {}),
    "glm4_moe": (NEXTN, 2, {"recycles_normed": False}),
    "qwen3_moe": (QWEN, 0, {}),
    "ernie4_5_moe": (ERNIE, 0, {"recycles_normed": False}),
}


def family(model_type: str, tmp_path: Path, *, dense: bool = False) -> tuple[Path, Module]:
    """A random target with a module whose layer is of its own family."""
    layout, index, how = FAMILIES[model_type]
    path = moe_target(tmp_path / "target", model_type)
    module = moe_module(model_type, tmp_path / "scratch", dense=dense, **how)
    if "norm" not in layout:
        module = without_final_norm(module)
    save_file(module.tensors(layout, index), path / "mtp.safetensors")
    return path, module


@pytest.mark.parametrize(
    ("model_type", "dense"), [*[(name, False) for name in FAMILIES], ("ernie4_5_moe", True), ("qwen3_moe", True)]
)
def test_a_layer_of_the_targets_own_family_drafts_as_the_librarys_does(model_type, dense, tmp_path):
    path, module = family(model_type, tmp_path, dense=dense)
    prompt = list(range(5, 28))
    (text,) = continued(LLM(str(path), max_model_len=128), [prompt])
    llm = engine(path, 4, max_model_len=128)
    assert_replayed(llm, module.draft(TargetStates(path)), text, len(prompt), 4, every=3)
    assert hasattr(proposer_of(llm).network.layer.mlp, "experts") != dense


def test_a_head_with_joined_experts_drafts_as_the_librarys_does(tmp_path):
    path = moe_target(tmp_path / "target", "qwen3_moe")
    module = moe_module("qwen3_moe", tmp_path / "scratch")
    config = json.loads((tmp_path / "scratch" / "config.json").read_text())
    experts = [
        {part: module.layer_tensors.pop(f"mlp.experts.{e}.{part}_proj.weight") for part in ("gate", "up", "down")}
        for e in range(4)
    ]
    both = [torch.cat([each["gate"], each["up"]]) for each in experts]
    module.layer_tensors["mlp.experts.gate_up_proj"] = torch.stack(both)
    module.layer_tensors["mlp.experts.down_proj"] = torch.stack([each["down"] for each in experts])
    head = speculators_head(tmp_path / "head", module, config)
    prompt = list(range(5, 28))
    (text,) = continued(LLM(str(path), max_model_len=128), [prompt])
    llm = speculate(path, "mtp", 3, speculative={"model": str(head)}, max_model_len=128)
    assert_replayed(llm, module.draft(TargetStates(path)), text, len(prompt), 3)


@pytest.mark.parametrize(("asked", "runs"), [(None, "batched_mm"), ("eager", "eager"), ("grouped_mm", "grouped_mm")])
def test_experts_of_the_module_run_as_asked_or_as_the_targets(asked, runs, tmp_path):
    path, _ = family("qwen3_moe", tmp_path)
    speculative = {} if asked is None else {"moe_backend": asked}
    llm = engine(path, 2, speculative=speculative, moe_backend="batched_mm", max_model_len=128)
    experts = proposer_of(llm).network.layer.mlp.experts
    assert experts.config._experts_implementation == runs
    plain = continued(LLM(str(path), moe_backend="batched_mm", max_model_len=128), [list(range(5, 28))])
    assert continued(llm, [list(range(5, 28))]) == plain


def test_the_recycled_state_can_be_chosen(target, tmp_path):
    module = tiny_module(recycles_normed=False)
    path = tiny_target(tmp_path / "target", module.tensors(QWEN, 0))
    llm = engine(path, 4, speculative={"proposer_config": {"recycled_hidden": "block"}})
    facts.replayed(llm, module.draft(target), 1, 4, every=4)


def test_only_the_module_is_read_from_the_targets_checkpoint(directory, monkeypatch):
    llm = engine(directory, 2)
    proposer, asked = proposer_of(llm), []
    services = proposer.services
    real = services.load_tensors
    monkeypatch.setattr(services, "load_tensors", lambda *args: asked.append(real(*args)) or asked[-1])
    with torch.no_grad():
        proposer.build()
    assert all(name.startswith("mtp.") for name in asked[0])
    assert len(asked[0]) == 15


@pytest.fixture(scope="module")
def start(directory):
    return partial(engine, directory)


class TestText(PlainText):
    """With drafts it is that of plain decoding."""


@pytest.fixture(scope="module", params=slow_unless("scarce", ROOMS))
def forced(request, directory) -> LLM:
    return engine(directory, 5, method="mtp_checkpoints:ForcedMtp", **ROOMS[request.param])


@settings(max_examples=3, deadline=None, derandomize=True)
@given(pattern=st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(pattern, forced, module, target):
    facts.assert_drafts_of_a_fresh_prefill(forced, pattern, module.draft(target))


def test_device_form_of_a_step_gives_the_same_drafts(directory):
    names = ("mtp_checkpoints:ForcedMtp", "mtp_checkpoints:ForcedInDeviceForm")
    facts.assert_same_drafts(
        (engine(directory, 5, method=name, max_num_batched_tokens=64) for name in names), (3, 0, 5, 1)
    )


@pytest.mark.parametrize("distribution", ["sparse", "dense"])
def test_reported_distribution_is_the_distribution_drawn_from(distribution, directory, module, target):
    llm = engine(directory, 3, method="mtp_checkpoints:RecordingMtp", speculative=facts.probabilistic(distribution))
    facts.assert_drawn_from(llm, lambda text, count, drawn: module.rollout(text, count, target, drawn)[1])


def test_greedy_rows_report_no_distribution(directory):
    speculative = {"draft_sample_method": "probabilistic"}
    llm = engine(directory, 4, method="mtp_checkpoints:RecordingMtp", speculative=speculative)
    continued(llm, tiny_prompts()[:2])
    assert proposer_of(llm).steps
    assert all(draft.distribution is None for _, draft in proposer_of(llm).steps)


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"quantization": "int8_weight_only"}], ids=str)
def test_the_module_runs_in_a_dtype_or_quantization_of_its_own(changes, directory):
    if "quantization" in changes:
        pytest.importorskip("torchao")
    llm = engine(directory, 3, speculative=changes)
    assert continued(llm, tiny_prompts()[:2]) == tiny_truth()[:2]
    network = proposer_of(llm).network
    assert (network.projection.weight.dtype == torch.bfloat16) == ("dtype" in changes)
    assert network.rotary.inv_freq.dtype == torch.float32
