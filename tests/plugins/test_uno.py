"""Uno: the target under an adapter drafts what transformers computes, and its own passes never see the adapter."""

from __future__ import annotations

import facts
import pytest
import torch
from inside import proposer_of
from lora_checkpoints import Lora, V, lora
from plain_text import PlainText
from replaying import InDeviceForm, Recording, continued, tiny_prompts, tiny_truth

from specdec.plugins.uno.proposer import UnoProposer, noise
from specdec.sdk import SpecdecError
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import is_adapter, load_adapter

METHOD = "specdec.plugins.uno.proposer:UnoProposer"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


class RecordingUno(Recording, UnoProposer):
    pass


class UnoInDeviceForm(InDeviceForm, RecordingUno):
    pass


@pytest.fixture(scope="module")
def adapter() -> Lora:
    return lora()


@pytest.fixture(scope="module")
def directory(adapter, tmp_path_factory):
    return adapter.save(tmp_path_factory.mktemp("uno") / "draft")


engine = facts.engines_of(METHOD)


@pytest.fixture(scope="module")
def start(directory):
    return lambda k, **others: engine(directory, max(k, 2), **others)


def logits_of(adapter, target, committed, k):
    length = len(committed)
    rows = noise(torch.arange(length, length + k - 1), V).tolist()  # row j stands at the position of the draft before
    return adapter.logits(target, committed, k, rows)


@pytest.mark.parametrize("k", [2, 4])
def test_drafts_and_accepted_counts_are_those_of_a_replay(k, directory, adapter, target):
    rounds = []

    def draft(committed, count):
        rounds.append(count)
        return logits_of(adapter, target, committed, count).argmax(-1).tolist()

    accepted = facts.replayed(engine(directory, k), draft, 5, k)
    assert accepted >= len(rounds), "the first draft of a round is the target's own"


def test_the_adapter_decides_what_rows_of_noise_draft(adapter, target):
    text, plain = tiny_truth()[3][:30], Lora(adapter.config, {})
    without, with_it = (logits_of(each, target, text, 4).argmax(-1) for each in (plain, adapter))
    assert without[0] == with_it[0]
    assert (without[1:] != with_it[1:]).all()


def test_text_is_that_of_plain_decoding_in_chunks_and_with_preemption(start):
    facts.assert_plain_text_in_chunks_and_with_preemption(lambda **room: start(4, **room))


@pytest.mark.full
class TestText(PlainText):
    """With drafts it is that of plain decoding."""


def test_device_form_of_a_step_gives_the_same_drafts(directory):
    found = []
    for name in ("RecordingUno", "UnoInDeviceForm"):
        llm = engine(directory, 3, method=f"test_uno:{name}")
        assert continued(llm, tiny_prompts()[2:3]) == tiny_truth()[2:3]
        steps = proposer_of(llm).steps
        found.append([(length, draft.token_ids[0].tolist()) for length, draft in steps if int(draft.lengths[0]) == 3])
    assert found[0] == found[1]
    assert len(found[0]) > 5


@pytest.mark.parametrize("distribution", ["sparse", pytest.param("dense", marks=pytest.mark.slow)])
def test_reported_distribution_is_the_distribution_drawn_from(distribution, adapter, target, directory):
    llm = engine(directory, 3, method="test_uno:RecordingUno", speculative=facts.probabilistic(distribution))
    facts.assert_drawn_from(llm, lambda text, count, drawn: logits_of(adapter, target, text, count), max_tokens=8)


def test_new_weights_of_the_adapter_are_drafted_with(adapter, directory, tmp_path):
    new = {name: 0.5 * tensor.flip(0) for name, tensor in adapter.tensors.items() if "lora_B" in name}
    fresh, updated = (
        engine(adapter.changed(new).save(tmp_path / "new"), 3, method="test_uno:RecordingUno"),
        engine(directory, 3, method="test_uno:RecordingUno"),
    )
    updated.update_proposer_weights(new)
    found = []
    for llm in (fresh, updated):
        continued(llm, tiny_prompts()[:1])
        found.append([draft.token_ids.tolist() for _, draft in proposer_of(llm).steps])
    assert found[0] == found[1]


def test_noise_is_spread_over_the_vocabulary():
    found = noise(torch.arange(40_000), 100)
    counts = torch.bincount(found, minlength=100)
    assert len(counts) == 100
    assert 300 < counts.min() <= counts.max() < 500


def test_an_adapter_is_recognised_by_its_configuration(directory):
    checkpoint = Checkpoint.open(directory)
    assert is_adapter(checkpoint)
    assert checkpoint.config_file == directory / "adapter_config.json"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2, "k_proj": 2}}, 4.0),
        ({"r": 9, "rank_pattern": {r"layers\.\d+.self_attn.q_proj": 4}}, 4.0),
    ],
)
def test_a_scale_is_what_peft_computes(config, scale, adapter, tmp_path):
    tensors = {f"{Q}.lora_{side}.weight": adapter.tensors[f"{Q}.lora_{side}.weight"] for side in "AB"}
    made = Lora(adapter.config | config, tensors)
    terms = load_adapter(Checkpoint.open(made.save(tmp_path / "made")), tensors)
    (term,) = terms.values()
    assert list(terms) == ["model.layers.0.self_attn.q_proj"]
    assert torch.equal(term.up.weight, scale * tensors[f"{Q}.lora_B.weight"])


def elsewhere(adapter: Lora, old: str, new: str) -> Lora:
    """The same matrices for other layers."""
    return Lora(adapter.config, {name.replace(old, new): each for name, each in adapter.tensors.items()})


def on_the_head(adapter: Lora) -> Lora:
    stem = "base_model.model.lm_head.lora_"
    return adapter.changed({f"{stem}A.weight": torch.zeros(4, 256), f"{stem}B.weight": torch.zeros(V, 4)})


REFUSED = {
    "another kind": (lambda a: a.changed(peft_type="LOHA"), "kind 'LOHA' is not implemented"),
    "magnitudes": (lambda a: a.changed(use_dora=True), "use_dora: True is not implemented"),
    "biases": (lambda a: a.changed(bias="all"), "bias: 'all' is not implemented"),
    "a start that changes the model": (lambda a: a.changed(init_lora_weights="pissa_niter_4"), "pissa.*other weights"),
    "no rank": (lambda a: a.changed(r=None), "SD-E170.*'r'.*adapter_config.json"),
    "another rank": (lambda a: a.changed(r=8), r"SD-E298.*lora_A \[8, in\].*lora_A \[4, "),
    "matrices that do not meet": (
        lambda a: a.changed({f"{Q}.lora_B.weight": torch.zeros(256, 3)}), r"SD-E298.*lora_B \[256, 3\]",
    ),
    "half a pair": (lambda a: a.changed({f"{Q}.lora_B.weight": None}), r"SD-E172.*q_proj.lora_B"),
    "no pair": (lambda a: Lora(a.config, {}), "SD-E172.*lora_A"),
    "another tensor": (lambda a: a.changed({"x.lora_magnitude_vector": torch.zeros(2)}), "SD-E174.*lora_magnitude"),
    "a layer that is not there": (
        lambda a: elsewhere(a, "q_proj", "qq_proj"), r"SD-E297.*0\.self_attn\.qq_proj.*mean.*0\.self_attn\.q_proj",
    ),
    "a layer beyond the last": (lambda a: elsewhere(a, "layers.7", "layers.70"), r"SD-E297.*layers\.70"),
    "other inputs": (
        lambda a: a.changed({f"{Q}.lora_A.weight": torch.zeros(4, 99)}), "SD-E297.*256 inputs, 256 outputs",
    ),
    "other outputs": (
        lambda a: a.changed({f"{Q}.lora_B.weight": torch.zeros(99, 4)}), "SD-E297.*256 outputs.*99 outputs",
    ),
    "a layer of named tensors": (
        lambda a: elsewhere(a, "self_attn.q_proj", "self_attn"), "SD-E297.*0.self_attn.*on one tensor.*Attention",
    ),
    "rows of the head": (on_the_head, "SD-E297.*lm_head.*some of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name, adapter, tmp_path):
    change, message = REFUSED[name]
    with pytest.raises(SpecdecError, match=f"(?s){message}"):
        engine(change(adapter).save(tmp_path / "draft"), 3)
