"""DFlash in the engine: it drafts what the format says, whatever was accepted, rejected or preempted before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import facts
import make_dflash
import pytest
import torch
from block_engines import NUM_TOKENS, assert_drawn_from, assert_replayed, speculate
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import proposer_of
from make_dflash import BLOCK, H, Made, Replay, flattened, speculators, speculators_reduced, trained, z_lab
from plugin_helpers import GREEDY, TargetStates, drafted_by_engine
from replaying import continued, tiny_prompts, tiny_truth
from sweeps import slow_unless

from specdec import LLM, SamplingParams
from specdec.plugins.dflash.proposer import kept_entries

pytestmark = pytest.mark.slow


def sliding(path: Path) -> Made:
    """speculators, the first layer with a window (causal inside the block), the second without."""
    made = speculators(path)
    made.config["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
    }
    made.causal, made.windows = (True, False), (6, None)
    return made


def sliding_not_causal(path: Path) -> Made:
    made = sliding(path)
    made.config["sliding_window_non_causal"] = True
    made.causal = (False, False)
    return made


def window_everywhere(path: Path) -> Made:
    made = z_lab(path)
    made.config["dflash_config"] |= {"use_swa": True, "swa_window_size": 9}
    made.windows = (9, 9)
    return made


def causal(path: Path) -> Made:
    made = z_lab(path)
    made.config["is_causal"] = True
    made.config["dflash_config"]["causal"] = False  # is_causal comes first
    made.causal = (True, True)
    return made


def from_anchor(path: Path) -> Made:
    made = z_lab(path)
    made.config["dflash_config"]["sample_from_anchor"] = True
    made.first_slot = 0
    return made


def own_mask_row(path: Path) -> Made:
    """A mask token beyond the target's embedding, with a row of its own."""
    made = flattened(path)
    made.config["mask_token_id"] = made.mask_id = make_dflash.V
    made.mask_row = torch.randn(H, generator=torch.Generator().manual_seed(3))
    path.mkdir()
    torch.save({"mask_token_id": made.mask_id, "embedding": made.mask_row}, path / "mask_embedding.pt")
    return made


def narrow(path: Path) -> Made:
    """Layers of another width than the target's, with embedding and head of their own."""
    made = speculators(path)
    made.config["transformer_layer_config"]["hidden_size"] = 64
    made.config["target_hidden_size"] = H
    generator = torch.Generator().manual_seed(4)
    made.tensors = make_dflash.random_tensors(width=64)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        made.tensors[name] = torch.randn(make_dflash.V, 64, generator=generator)
    return made


def older_file(path: Path) -> Made:
    """An older speculators file: the target's embedding and a whole head are in it."""
    made = speculators(path)
    made.tensors["embed_tokens.weight"] = TargetStates().embedding.detach().bfloat16()
    made.tensors["lm_head.weight"] = torch.randn(make_dflash.V, H, generator=torch.Generator().manual_seed(6))
    return made


def last_boundary(path: Path) -> Made:
    """Reads the residual stream after the last layer, before the final norm; base of RoPE in `rope_parameters`."""
    made = z_lab(path)
    made.config["dflash_config"]["target_layer_ids"] = [0, 7]
    made.config |= {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}
    made.boundaries, made.theta = (1, 8), 20_000.0
    made.tensors = make_dflash.random_tensors(num_features=2)
    return made


MAKERS: list[Callable[[Path], Made]] = [
    z_lab,
    flattened,
    speculators,
    speculators_reduced,
    sliding,
    sliding_not_causal,
    window_everywhere,
    causal,
    from_anchor,
    own_mask_row,
    narrow,
    older_file,
    last_boundary,
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return tiny_prompts()


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    """Prompts with what plain decoding appends."""
    return tiny_truth()


def generate(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    """What the engine appends to prompts."""
    texts = continued(llm, prompts, params)
    return [text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)]


@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_drafts_and_accepted_counts_of_the_packaged_checkpoint_are_those_of_a_replay(k, prompts, truth, target):
    made = trained()
    llm, replay = speculate(made, k), Replay(made, target)
    accepted = sum(
        assert_replayed(llm, replay, sequence, len(prompt), k)
        for prompt, sequence in list(zip(prompts, truth, strict=True))[3:6]
    )
    assert accepted > 0, "agreement on drafts that are all rejected would show little"


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_drafts_of_every_layout_are_those_of_a_replay(make, prompts, truth, target, tmp_path):
    made = make(tmp_path / "draft").save()
    k = BLOCK - 1
    assert_replayed(speculate(made, k), Replay(made, target), truth[4], len(prompts[4]), k)


def test_chunks_of_a_lone_prompt_leave_no_hole_in_the_context(prompts, truth, target, tmp_path):
    made = sliding(tmp_path / "draft").save()
    llm = speculate(made, 8, max_num_batched_tokens=16)
    assert_replayed(llm, Replay(made, target), truth[9], len(prompts[9]), 8)


def test_a_step_runs_the_network_once(prompts):
    llm = speculate(trained(), 7)
    passes = []
    proposer_of(llm).network.norm.register_forward_hook(lambda *_: passes.append(1))
    generate(llm, prompts[:4])
    assert len(passes) == llm.engine.metrics.counts["proposer_propose_calls"] > 0


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_shortest_and_the_longest_drafts_of_every_layout_are_those_of_a_replay(
    make, k, prompts, truth, target, tmp_path
):
    made = make(tmp_path / "draft").save()
    llm, replay = speculate(made, k), Replay(made, target)
    for index in (0, 7, 15):
        assert_replayed(llm, replay, truth[index], len(prompts[index]), k)


def test_one_row_of_context_more_or_less_would_be_noticed(prompts, truth, target, tmp_path):
    replay = Replay(z_lab(tmp_path), target)
    length = len(prompts[4]) + 1
    right = replay.draft(truth[4], length, 8)
    assert replay.draft(truth[4], length, 8, context=length) != right  # the newest token's own row
    assert replay.draft(truth[4], length, 8, context=length - 2) != right


@pytest.mark.parametrize("make", [z_lab, speculators, last_boundary], ids=lambda make: make.__name__)
def test_hidden_states_are_those_of_the_hooked_target(make, truth, prompts, target, tmp_path):
    made = make(tmp_path / "draft").save()
    llm = speculate(made, 4, method="make_dflash:Forced", max_num_batched_tokens=16)
    proposer = proposer_of(llm)
    proposer.known = (truth[2],)
    generate(llm, prompts[2:3])
    states = target.of(truth[2])
    expected = torch.cat([states[k] for k in made.boundaries], dim=-1)
    assert len(proposer.shown) >= len(prompts[2]) + NUM_TOKENS - 6
    for tokens, hidden in proposer.shown.items():
        torch.testing.assert_close(hidden, expected[len(tokens) - 1], rtol=1e-4, atol=1e-4)


SETTINGS = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 32},
    "scarce": {"num_kv_blocks": 14, "block_size": 16},
}


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_greedy_equals_plain_decoding(batch_size, prompts, truth):
    outputs = generate(speculate(trained(), 7), prompts[:batch_size])
    assert outputs == [sequence[len(prompt) :] for prompt, sequence in zip(prompts, truth, strict=True)][:batch_size]


@pytest.mark.parametrize("name", ["chunked", "scarce"])
def test_greedy_equals_plain_decoding_however_the_work_is_cut_up(name, prompts, truth):
    llm = speculate(trained(), 5, **SETTINGS[name])
    assert generate(llm, prompts[:6]) == [
        sequence[len(prompt) :] for prompt, sequence in zip(prompts[:6], truth, strict=False)
    ]
    if name == "scarce":
        assert llm.engine.metrics.counts["num_preemptions"] > 0


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_equals_plain_decoding_for_the_shortest_and_the_longest_drafts(name, k, prompts, truth):
    outputs = generate(speculate(trained(), k, **SETTINGS[name]), prompts)
    assert outputs == [sequence[len(prompt) :] for prompt, sequence in zip(prompts, truth, strict=True)]


def test_text_up_to_max_model_len_equals_plain_decoding(prompts):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    limit = {"max_model_len": 72, "block_size": 8}
    expected = generate(LLM("tiny", **limit), prompts[:3], params)
    assert [len(prompt) + len(output) for prompt, output in zip(prompts, expected, strict=False)] == [72] * 3
    assert generate(speculate(trained(), 7, **limit), prompts[:3], params) == expected


@pytest.fixture(scope="module", params=slow_unless("scarce", SETTINGS))
def forced(request) -> LLM:
    return speculate(trained(), 7, method="make_dflash:Forced", **SETTINGS[request.param])


@settings(max_examples=4, deadline=None, derandomize=True)
@given(pattern=st.lists(st.integers(0, 7), min_size=1, max_size=7))
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(pattern, forced, truth, target):
    replay = Replay(trained(), target)

    def draft(committed, count):
        sequence = next(each for each in truth if each[: len(committed)] == committed)
        return replay.draft(sequence, len(committed), 7)[:count]

    facts.assert_drafts_of_a_fresh_prefill(forced, pattern, draft, every=3)
    assert (forced.engine.metrics.counts["num_preemptions"] > 0) == (forced.engine.config.num_kv_blocks is not None)


def test_a_fresh_engine_drafts_what_one_with_a_history_does(prompts):
    llm = facts.told(speculate(trained(), 7, method="make_dflash:Forced"), (2, 0, 7, 1))
    generate(llm, prompts[3:5])
    fresh = speculate(trained(), 7)
    for committed, draft in list(proposer_of(llm).drafts.items())[2::5]:
        (first, *_) = drafted_by_engine(fresh, committed[:-1])
        assert first.committed == list(committed)
        assert first.draft[: len(draft)] == draft


def test_device_form_of_a_step_gives_the_same_drafts(prompts):
    found = []
    for method in ("make_dflash:Forced", "make_dflash:ForcedInDeviceForm"):
        llm = facts.told(speculate(trained(), 7, method=method, max_num_batched_tokens=64), (3, 0, 7, 1))
        lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 32, 20, 32)]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:4]], lengths)
        found.append(proposer_of(llm).drafts)
    assert found[0] == found[1]
    assert len(found[0]) > 10


def slots_after_a_push(made: Made, prompt: list[int], slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [W, h] of the first block, as it is and with the input of one slot changed."""
    outputs = []
    for amount in (0.0, 1.0):
        llm = speculate(made, BLOCK - 1)
        network = proposer_of(llm).network
        push = torch.zeros(BLOCK, H)
        push[slot] = amount
        network.layers[0].register_forward_pre_hook(lambda _, args, push=push: (args[0] + push, *args[1:]))
        seen: list[torch.Tensor] = []
        network.norm.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out[0].clone()))
        generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        outputs.append(seen[0])
    return outputs[0], outputs[1]


@pytest.mark.parametrize(
    ("make", "sees_later"),
    [(speculators, True), (z_lab, True), (causal, False)],
    ids=["speculators", "z_lab", "causal"],
)
def test_an_earlier_slot_sees_a_later_one_unless_the_block_is_causal(make, sees_later, prompts, tmp_path):
    plain, pushed = slots_after_a_push(make(tmp_path / "draft").save(), prompts[4], slot=BLOCK - 1)
    assert not torch.allclose(plain[-1], pushed[-1])
    assert torch.allclose(plain[1], pushed[1], atol=1e-6) != sees_later


def test_a_sliding_layer_is_causal_inside_the_block(prompts, tmp_path):
    made = sliding(tmp_path / "draft")
    made.config["transformer_layer_config"]["layer_types"] = ["sliding_attention"] * 2
    plain, pushed = slots_after_a_push(made.save(), prompts[4], slot=BLOCK - 1)
    assert torch.allclose(plain[1], pushed[1], atol=1e-6)


@pytest.mark.parametrize("distribution", ["sparse", "dense"])
@pytest.mark.parametrize("make", [speculators_reduced, None], ids=["reduced", "packaged"])
def test_reported_distribution_is_the_distribution_drawn_from(distribution, make, tmp_path, target):
    made = trained() if make is None else make(tmp_path / "draft").save()
    llm = speculate(made, 4, method="make_dflash:Recording", speculative=facts.probabilistic(distribution))
    replay = Replay(made, target)
    assert_drawn_from(llm, lambda text, count, drawn: replay.logits(text, len(text), 4, len(text) - 1), made, 24)


def test_greedy_rows_report_no_distribution(prompts):
    speculative = {"draft_sample_method": "probabilistic"}
    llm = speculate(trained(), 4, method="make_dflash:Recording", speculative=speculative)
    generate(llm, prompts[:2])
    steps = proposer_of(llm).steps
    assert steps
    assert all(draft.distribution is None for _, draft in steps)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_a_draft_network_in_another_dtype_keeps_its_rotary_frequencies(dtype, prompts, truth):
    llm = speculate(trained(), 7, speculative={"dtype": dtype})
    network = proposer_of(llm).network
    assert network.fc.weight.dtype == torch.bfloat16
    assert network.rotary.inv_freq.dtype == torch.float32
    assert generate(llm, prompts[:2]) == [
        sequence[len(prompt) :] for prompt, sequence in zip(prompts[:2], truth, strict=False)
    ]


def test_a_rejected_entry_gives_way_to_the_last_kept_one_before_it():
    """Entries of three requests, of which 2 of 3, 1 of 1 and 1 of 3 are kept; two entries more belong to nobody."""
    index, owner = kept_entries(torch.tensor([0, 3, 4, 7]), torch.tensor([2, 1, 1]), 9)
    assert index.tolist() == [0, 1, 1, 3, 4, 4, 4, 4, 4]
    assert owner.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
