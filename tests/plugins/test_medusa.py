"""Medusa: heads of both publishers' layouts draft what the format says, and nothing else changes."""

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
from medusa_checkpoints import Heads, fitted_heads, save_fasterdecoding, save_vllm, truncated
from plain_text import PlainText
from plugin_helpers import TINY, TargetStates
from replaying import ROOMS, continued, speculate, tiny_prompts, tiny_truth
from safetensors.torch import load_file, save_file
from sweeps import slow_unless

from specdec import LLM
from specdec.plugins.medusa.proposer import MedusaProposer
from specdec.sdk import Refusal, SpecdecError
from specdec.sdk.errors import PluginLoadError

pytestmark = pytest.mark.slow

V = 4096
NUM_HEADS = 8


@pytest.fixture(scope="module")
def heads(target) -> Heads:
    """Fitted to some of the texts that they are tried on."""
    return fitted_heads(target, [token for text in tiny_truth()[3:9] for token in text], NUM_HEADS)


@pytest.fixture(scope="module")
def shared_head(heads, target) -> Heads:
    """Layers of their own in front of one output head."""
    layers = [[(weight * (1 + 10 * i), bias) for weight, bias in each] for i, each in enumerate(heads.layers)]
    return Heads(layers, [heads.outputs[0]] * NUM_HEADS)


@pytest.fixture(scope="module")
def directory(heads, tmp_path_factory) -> Path:
    return save_vllm(tmp_path_factory.mktemp("medusa"), heads)


engine = facts.engines_of("medusa")


def replay(heads: Heads, target: TargetStates):
    """Head i on the final hidden state that gave the newest token: the one of the token before it."""

    def draft(committed: list[int], k: int) -> list[int]:
        final = target.of(committed[:-1])["final"][-1]
        return [heads.draft(head, final) for head in range(k)]

    return draft


def deep(heads: Heads) -> Heads:
    """One residual layer, used twice: the layers of a published file with two are equal."""
    return Heads([layers * 2 for layers in heads.layers], heads.outputs)


def without_bias(heads: Heads) -> Heads:
    return Heads([[(weight, None) for weight, _ in layers] for layers in heads.layers], heads.outputs)


def in_reverse(heads: Heads) -> Heads:
    """Half of the vocabulary, in decreasing order: ids, not offsets."""
    return truncated(heads, range(V - 1, V // 2 - 1, -1))


def packaged_medusa(target: TargetStates) -> Heads:
    """The heads in assets/tiny, read by name."""
    stored = {name: each.float() for name, each in load_file(TINY / "medusa" / "model.safetensors").items()}
    config = json.loads((TINY / "medusa" / "config.json").read_text())
    layers = [
        [(stored[f"blocks.{i}.layers.{j}.weight"], None) for j in range(config["num_hidden_layers"])]
        for i in range(config["num_heads"])
    ]
    outputs = [stored[f"lm_heads.{i}.weight"] for i in range(config["num_heads"])]
    return Heads(layers, outputs, stored["token_map"].long())


LAYOUTS = {
    "fasterdecoding": (save_fasterdecoding, lambda heads: heads, {}),
    "fasterdecoding_of_a_whole_model": (save_fasterdecoding, lambda heads: heads, {"prefix": "medusa_head."}),
    "fasterdecoding_two_layers": (save_fasterdecoding, deep, {}),
    "vllm": (save_vllm, lambda heads: heads, {}),
    "vllm_prefixed": (save_vllm, deep, {"prefix": "medusa_heads."}),
    "vllm_no_bias": (save_vllm, without_bias, {}),
    "vllm_truncated": (save_vllm, in_reverse, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_and_accepted_counts_of_every_layout_are_those_of_a_replay(name, heads, target, tmp_path):
    save, change, options = LAYOUTS[name]
    changed = change(heads)
    llm = engine(save(tmp_path, changed, **options), 5)
    accepted = facts.replayed(llm, replay(changed, target), 5, 5)
    assert accepted > 0 or name == "vllm_truncated", "agreement on drafts that are all rejected would show little"


@pytest.mark.parametrize("k", [1, 3, 8])
def test_every_number_of_drafts_is_that_of_a_replay(k, directory, heads, target):
    llm = engine(directory, k)
    facts.replayed(llm, replay(heads, target), 4, k)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_longest_drafts_of_every_layout_are_those_of_a_replay(name, heads, target, tmp_path):
    save, change, options = LAYOUTS[name]
    changed = change(heads)
    llm = engine(save(tmp_path, changed, **options), 8)
    for index in (0, 7, 15):
        facts.replayed(llm, replay(changed, target), index, 8)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "the_targets"])
def test_one_output_head_serves_all(stored, shared_head, target, tmp_path):
    save_vllm(tmp_path, shared_head, original_lm_head=True)
    if not stored:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        shared_head = Heads(shared_head.layers, [target.head.detach()] * NUM_HEADS)
    llm = engine(tmp_path, 3)
    facts.replayed(llm, replay(shared_head, target), 5, 3)


def test_the_packaged_checkpoint_drafts_as_a_replay_does(target):
    if not (TINY / "medusa" / "model.safetensors").is_file():
        pytest.skip("assets/tiny has no medusa heads")
    llm = speculate("tiny", "medusa", 3, speculative={"model": str(TINY / "medusa")})
    heads = packaged_medusa(target)
    accepted = sum(facts.replayed(llm, replay(heads, target), index, 3) for index in (3, 4, 5))
    assert accepted > 0


@pytest.mark.parametrize("save", [save_fasterdecoding, save_vllm], ids=["fasterdecoding", "vllm"])
def test_a_directory_says_itself_that_it_is_for_medusa(save, heads, tmp_path):
    config = {"model": str(save(tmp_path, heads)), "num_speculative_tokens": 2}
    assert isinstance(proposer_of(LLM("tiny", speculative_config=config, max_model_len=64)), MedusaProposer)


def test_stored_heads_decide_where_the_configuration_states_fewer(heads, tmp_path):
    llm = engine(save_fasterdecoding(tmp_path, heads, stated_heads=2), 8)
    assert len(proposer_of(llm).network.blocks) == 8


def test_heads_beyond_the_number_of_drafts_are_not_loaded(directory):
    assert len(proposer_of(engine(directory, 2)).network.lm_heads) == 2


def test_more_drafts_than_stored_heads_are_refused_with_both_numbers(heads, tmp_path):
    save_fasterdecoding(tmp_path, Heads(heads.layers[:3], heads.outputs[:3]), stated_heads=5)
    with pytest.raises(Refusal, match=r"num_speculative_tokens is 4, .* drafts at most 3 tokens"):
        engine(tmp_path, 4)


@pytest.fixture(scope="module")
def start(directory):
    return partial(engine, directory)


class TestText(PlainText):
    """With drafts it is that of plain decoding."""


@pytest.fixture(scope="module", params=slow_unless("scarce", ROOMS))
def forced(request, directory) -> LLM:
    return engine(directory, 5, method="medusa_checkpoints:ForcedMedusa", **ROOMS[request.param])


@settings(max_examples=3, deadline=None, derandomize=True)
@given(pattern=st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(pattern, forced, heads, target):
    facts.assert_drafts_of_a_fresh_prefill(forced, pattern, replay(heads, target))


def test_device_form_of_a_step_gives_the_same_drafts(directory):
    names = ("medusa_checkpoints:ForcedMedusa", "medusa_checkpoints:ForcedInDeviceForm")
    facts.assert_same_drafts(
        (engine(directory, 5, method=name, max_num_batched_tokens=64) for name in names), (3, 0, 5, 1)
    )


@pytest.mark.parametrize("distribution", ["sparse", "dense"])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "truncated"])
def test_reported_distribution_is_the_distribution_drawn_from(distribution, part, heads, target, tmp_path):
    heads = in_reverse(heads) if part else heads
    method, speculative = "medusa_checkpoints:RecordingMedusa", facts.probabilistic(distribution)

    def logits(text, count, drawn):
        final = target.of(text[:-1])["final"][-1]
        return torch.stack([heads.logits(head, final) for head in range(count)])

    facts.assert_drawn_from(
        engine(save_vllm(tmp_path, heads), 4, method=method, speculative=speculative), logits, heads.token_map
    )


def test_greedy_rows_report_no_distribution(directory):
    llm = engine(
        directory,
        4,
        method="medusa_checkpoints:RecordingMedusa",
        speculative={"draft_sample_method": "probabilistic"},
    )
    continued(llm, tiny_prompts()[:2])
    assert proposer_of(llm).steps
    assert all(draft.distribution is None for _, draft in proposer_of(llm).steps)


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_logits_are_multiplied_by_the_scale_that_the_checkpoint_states(kind, heads, shared_head, tmp_path):
    found = []
    for name, stated in {"plain": {}, "scaled": {"logit_scale": 0.25}}.items():
        made, shares = (heads, False) if kind == "own" else (shared_head, True)
        path = save_vllm(tmp_path / name, made, original_lm_head=shares)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | stated))
        network = proposer_of(engine(path, 2, method="medusa")).network
        found.append(network(torch.linspace(-1, 1, 256)[None], 2))
    assert torch.equal(found[1], 0.25 * found[0])


def changed_tensors(directory: Path, heads: Heads, change) -> Path:
    """A vLLM checkpoint with its dict of tensors changed."""
    tensors = load_file(save_vllm(directory, heads) / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


BROKEN = {
    "no_second_layer": (lambda t: t.pop("blocks.1.layers.0.weight"), "SD-E172", r"blocks\.1\.layers\.0\.weight"),
    "no_bias": (lambda t: t.pop("blocks.1.layers.0.bias"), "SD-E172", r"blocks\.1\.layers\.0\.bias"),
    "no_output": (lambda t: t.pop("lm_heads.1.weight"), "SD-E172", r"lm_heads\.1\.weight"),
    "narrow_output": (lambda t: t.update({"lm_heads.1.weight": torch.zeros(V, 8)}), "SD-E175", r"found \[4096, 8\]"),
    "unknown": (lambda t: t.update({"gate.weight": torch.zeros(2)}), "SD-E174", r"gate\.weight"),
    "long_map": (lambda t: t.update({"token_map": torch.arange(5)}), "SD-E173", r"token_map \[4096\]"),
    "repeated_map": (lambda t: t.update({"token_map": torch.zeros(V).long()}), "SD-E173", r"1 different ids"),
    "far_map": (
        lambda t: t.update({"token_map": torch.arange(V) + 1}),
        "SD-E173",
        r"4096 different ids in 1 \.\. 4096",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_an_error_that_names_the_tensor(name, heads, tmp_path):
    change, code, message = BROKEN[name]
    with pytest.raises(SpecdecError, match=message) as error:
        engine(changed_tensors(tmp_path, heads, change), 2)
    assert code in str(error.value)


def test_a_checkpoint_without_heads_is_an_error(tmp_path, heads):
    save_vllm(tmp_path, heads)
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecdecError, match=r"(?s)blocks\.0\.layers\.0\.weight or 0\.0\.linear.*has +fc\.weight"):
        engine(tmp_path, 2)


def test_a_layer_missing_before_the_output_head_is_an_error(heads, tmp_path):
    save_fasterdecoding(tmp_path, deep(heads))
    tensors = torch.load(tmp_path / "medusa_lm_head.pt", weights_only=True)
    kept = {name: tensor for name, tensor in tensors.items() if ".1.linear." not in name}
    torch.save(kept, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(SpecdecError, match=r"0\.1\.linear\.weight"):
        engine(tmp_path, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 32000}, "vocabulary is 32000, and this target's is 4096"),
        ({"hidden": 128}, "hidden size is 128, and this target's is 256"),
        ({"outputs": 5000}, "have 5000 outputs, the target's vocabulary 4096 tokens"),
        ({"outputs": 100}, "have 100 outputs, the target's vocabulary 4096 tokens, and there is no 'token_map'"),
    ],
)
def test_heads_of_another_target_are_refused_with_the_numbers(config, message, tmp_path):
    width, outputs = config.get("hidden", 256), config.get("outputs", V)
    made = Heads([[(torch.zeros(width, width), None)]], [torch.zeros(outputs, width)])
    file = save_vllm(tmp_path, made) / "config.json"
    stated = json.loads(file.read_text()) | {"vocab_size": config.get("vocab_size", V)}
    file.write_text(json.dumps(stated))
    with pytest.raises(PluginLoadError, match=message):
        engine(tmp_path, 1)


def test_a_missing_checkpoint_is_an_error():
    with pytest.raises(SpecdecError, match="needs a draft checkpoint"):
        speculate("tiny", "medusa", 2)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8_weight_only"}], ids=str)
def test_heads_run_in_a_dtype_or_quantization_of_their_own(settings, directory):
    if "quantization" in settings:
        pytest.importorskip("torchao")
    llm = engine(directory, 3, speculative=settings)
    assert continued(llm, tiny_prompts()[:2]) == tiny_truth()[:2]
    weight = proposer_of(llm).network.blocks[0].layers[0].weight
    assert (weight.dtype == torch.bfloat16) == ("dtype" in settings)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "recurrent_drafting_drafter", "exit_dim": 512, "rnn": True}, "ReDrafter"),
        ({"architectures": ["Drafter"], "exit_dim": 512}, "ReDrafter"),
    ],
    ids=["redrafter", "by-a-key"],
)
def test_relatives_are_recognised_and_refused_by_name(config, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match=f"a checkpoint of {name} .* is not implemented"):
        LLM("tiny", speculative_config={"model": str(tmp_path), "num_speculative_tokens": 3}, max_model_len=64)
