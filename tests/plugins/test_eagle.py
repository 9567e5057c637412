"""EAGLE heads in the engine: they draft what the formats say, whatever was accepted, rejected or preempted before."""

from __future__ import annotations

from pathlib import Path

import make_eagle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import plugin_of, proposer_of
from make_eagle import MAKERS, Made, flat_peagle, modelopt, peagle, safeailab_eagle1, specforge, speculators, trained
from plugin_helpers import GREEDY, TINY, TargetStates, drafted_by_engine
from replay_eagle import Replay
from replaying import NUM_TOKENS, ROOMS, assert_replayed, continued, tiny_prompts, tiny_truth
from sweeps import pairs

from specdec import LLM, SamplingParams

pytestmark = pytest.mark.slow

METHODS = ("eagle", "eagle3", "peagle")
TRAINED = [name for name in METHODS if (TINY / name / "config.json").is_file()]
FORCED = {"eagle": "replay_eagle:ForcedEagle", "eagle3": "replay_eagle:ForcedEagle3"}


@pytest.fixture(scope="module")
def target() -> TargetStates:
    return TargetStates()


def engine(made: Made, k: int, *, method: str | None = None, **settings) -> LLM:
    """Without a `method` the checkpoint says itself which proposer it is for."""
    speculative = {"model": str(made.path), "num_speculative_tokens": k}
    if method is not None:
        speculative["method"] = method
    return LLM("tiny", speculative_config=speculative, **({"max_model_len": 256} | settings))


def checkpoint(name: str, path: Path) -> Made:
    """A packaged checkpoint, or one with random weights where there is none packaged."""
    if name in TRAINED:
        return trained(name)
    return {"eagle": safeailab_eagle1, "peagle": peagle}[name](path / name).save()


def assert_replayed_from(llm: LLM, replay: Replay, index: int, k: int) -> int:
    """Every draft after one of the prompts is the replay's. Returns how many tokens were accepted."""
    sequence, num_prompt = tiny_truth()[index], len(tiny_prompts()[index])

    def draft(committed: list[int], count: int) -> list[int]:
        return replay.draft(sequence, len(committed), k)[:count]

    return assert_replayed(llm, draft, sequence, num_prompt, k)


@pytest.mark.parametrize("k", [1, 3, 5, 8])
@pytest.mark.parametrize("name", TRAINED)
def test_drafts_and_accepted_counts_of_packaged_checkpoints_are_those_of_a_replay(name, k, target):
    made = trained(name)
    llm, replay = engine(made, k), Replay(made, target)
    accepted = assert_replayed_from(llm, replay, 5, k)
    assert accepted > 0, "agreement on drafts that are all rejected would show little"


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_drafts_of_every_layout_are_those_of_a_replay(make, target, tmp_path):
    made = make(tmp_path / "draft").save()
    llm = engine(made, 5)
    assert plugin_of(llm).name == made.method
    assert_replayed_from(llm, Replay(made, target), 4, 5)


LONGEST_AND_SHORTEST = [(make, 8) for make in MAKERS]
LONGEST_AND_SHORTEST += [(make, 1) for make in (safeailab_eagle1, specforge, peagle, flat_peagle)]


@pytest.mark.full
@pytest.mark.parametrize(("make", "k"), LONGEST_AND_SHORTEST, ids=lambda value: getattr(value, "__name__", value))
def test_the_longest_drafts_of_every_layout_are_those_of_a_replay_and_the_shortest_too(make, k, target, tmp_path):
    made = make(tmp_path / "draft").save()
    llm, replay = engine(made, k), Replay(made, target)
    for index in (0, 6, 15):  # where random weights do not blow up what rounding leaves
        assert_replayed_from(llm, replay, index, k)


@pytest.mark.parametrize("make", [safeailab_eagle1, specforge, speculators, modelopt], ids=lambda make: make.__name__)
def test_hidden_states_are_those_of_the_hooked_target(make, target, tmp_path):
    made = make(tmp_path / "draft").save()
    prompt, sequence = tiny_prompts()[2], tiny_truth()[2]
    llm = engine(made, 4, method=FORCED[made.method], max_num_batched_tokens=16)
    proposer = proposer_of(llm)
    proposer.known = (sequence,)
    continued(llm, [prompt])
    states = target.of(sequence)
    expected = torch.cat([states[k] for k in made.features], dim=-1)
    assert len(proposer.shown) >= len(prompt) + NUM_TOKENS - 6
    for tokens, hidden in proposer.shown.items():
        torch.testing.assert_close(hidden, expected[len(tokens) - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_size", [4, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 16))])
@pytest.mark.parametrize("name", METHODS)
def test_greedy_equals_plain_decoding(name, batch_size, tmp_path):
    outputs = continued(engine(checkpoint(name, tmp_path), 5), tiny_prompts()[:batch_size])
    assert outputs == tiny_truth()[:batch_size]


@pytest.mark.parametrize("name", METHODS)
def test_greedy_equals_plain_decoding_in_chunks_and_with_preemption(name, tmp_path):
    llm = engine(checkpoint(name, tmp_path), 5, **(ROOMS["chunked"] | ROOMS["scarce"]))
    assert continued(llm, tiny_prompts()[:5]) == tiny_truth()[:5]
    assert llm.engine.metrics.counts["num_preemptions"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("k", "name", "room"), pairs([1, 3, 5, 8], METHODS, list(ROOMS)))
def test_greedy_equals_plain_decoding_for_every_length(name, room, k, tmp_path):
    assert continued(engine(checkpoint(name, tmp_path), k, **ROOMS[room]), tiny_prompts()) == tiny_truth()


@pytest.mark.parametrize("name", METHODS)
def test_text_up_to_max_model_len_equals_plain_decoding(name, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = [sequence[:68] for sequence in tiny_truth()[8:10]]
    sequences = continued(engine(checkpoint(name, tmp_path), 8, max_model_len=80, block_size=8), prompts, params)
    assert sequences == [sequence[:80] for sequence in tiny_truth()[8:10]]


HISTORIES = [
    "eagle-scarce",
    "eagle3-scarce",
    "peagle-scarce",
    *(pytest.param(f"{name}-{room}", marks=pytest.mark.full) for name in METHODS for room in ("roomy", "chunked")),
]


@pytest.fixture(scope="module", params=HISTORIES)
def forced(request, tmp_path_factory) -> tuple[Made, LLM]:
    name, _, room = request.param.partition("-")
    made = checkpoint(name, tmp_path_factory.mktemp("draft"))
    llm = engine(made, 5, method=FORCED[made.method], **ROOMS[room])
    proposer_of(llm).known = tuple(tiny_truth())
    return made, llm


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(pattern=st.lists(st.integers(0, 5), min_size=2, max_size=7))
def test_drafts_after_any_history_are_those_of_a_fresh_prefill(pattern, forced, target):
    made, llm = forced
    proposer = proposer_of(llm)
    proposer.pattern = tuple(pattern)
    proposer.drafts.clear()
    continued(llm, tiny_prompts()[1:6])
    replay = Replay(made, target)
    assert len(proposer.drafts) > 15
    for committed, draft in list(proposer.drafts.items())[::8]:
        sequence = next(each for each in tiny_truth() if each[: len(committed)] == list(committed))
        assert draft == replay.draft(sequence, len(committed), 5)[: len(draft)]
    assert (llm.engine.metrics.counts["num_preemptions"] > 0) == (llm.engine.config.num_kv_blocks is not None)


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_device_form_of_a_step_gives_the_same_drafts(name, tmp_path):
    """Rejected rows lie between the kept ones. Four requests of 1 + 5 * (accepted + 1) tokens end in one step."""
    found = []
    accepted = (3, 0, 5, 1)
    for method in ("replay_eagle:ForcedEagle3", "replay_eagle:ForcedInDeviceForm"):
        llm = engine(checkpoint(name, tmp_path), 5, method=method)
        proposer = proposer_of(llm)
        proposer.known, proposer.pattern = tuple(tiny_truth()), accepted
        lengths = [SamplingParams(temperature=0, max_tokens=1 + 5 * (a + 1), ignore_eos=True) for a in accepted]
        llm.generate([{"prompt_token_ids": prompt} for prompt in tiny_prompts()[:4]], lengths)
        found.append(proposer.drafts)
    assert found[0] == found[1]
    assert len(found[0]) > 15


@pytest.mark.parametrize("make", [peagle, flat_peagle], ids=lambda make: make.__name__)
def test_parallel_drafts_come_from_one_pass_and_a_shorter_one_gives_their_beginning(make, tmp_path):
    made = make(tmp_path / "draft").save()
    prompt, drafts = tiny_prompts()[4], []
    for k in (3, 8):
        llm = engine(made, k)
        widths: list[int] = []
        first = proposer_of(llm).network.layers[0]
        first.register_forward_hook(lambda _, args, out, widths=widths: widths.append(out.shape[1]))
        (seen, *_) = drafted_by_engine(llm, prompt)
        drafts.append(seen.draft)
        assert widths[:2] == [len(prompt), k - 1]
    assert drafts[1][:3] == drafts[0]


@pytest.mark.parametrize("make", [make_eagle.speculators, make_eagle.specforge_norm_before_fc])
def test_the_projection_is_for_the_targets_hidden_states_alone(make, tmp_path):
    """A pass over one drafted token per request skips it and its norms."""
    llm = engine(make(tmp_path / "draft").save(), 4)
    widths: list[int] = []
    fc = proposer_of(llm).network.fc
    fc.register_forward_hook(lambda _, args, out: widths.append(len(out)))
    prompt = tiny_prompts()[4]
    seen = drafted_by_engine(llm, prompt, GREEDY)
    assert widths == [len(prompt), *(each.num_accepted + 1 for each in seen)][: len(widths)]
    assert len(widths) >= len(seen)
