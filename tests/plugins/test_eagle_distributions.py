"""The distributions that EAGLE heads report are the distributions that their drafts were drawn from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import make_eagle
import pytest
import torch
from inside import proposer_of
from make_eagle import Made, latent, narrow, peagle, safeailab_eagle1, speculators, trained, wrapped_eagle1
from plugin_helpers import GREEDY, TINY, TargetStates
from replay_eagle import Replay
from replaying import continued, tiny_prompts, tiny_truth

from specdec import LLM, SamplingParams
from specdec.sdk import Draft

pytestmark = pytest.mark.slow

RECORDING = {"eagle": "replay_eagle:RecordingEagle", "eagle3": "replay_eagle:RecordingEagle3"}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=20, ignore_eos=True, seed=1)


def engine(made: Made, distribution: str, target: str = "tiny") -> LLM:
    speculative = {
        "method": RECORDING[made.method],
        "model": str(made.path),
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
        "proposer_config": {"draft_distribution": distribution, "sparse_top_m": 4096},
    }
    return LLM(target, speculative_config=speculative, max_model_len=256)


def reported(draft: Draft, made: Made) -> torch.Tensor:
    """The distribution of a draft's one row over target ids, [K, V]."""
    whole = torch.zeros(draft.token_ids.shape[1], make_eagle.V)
    if draft.distribution.sparse_ids is not None:
        ids, probs = draft.distribution.sparse_ids[0], draft.distribution.sparse_probs[0]
        return whole.scatter_add(-1, ids.clamp(min=0), probs.masked_fill(ids < 0, 0))
    return over_target_ids(draft.distribution.logits[0].softmax(-1), made)


def over_target_ids(probs: torch.Tensor, made: Made) -> torch.Tensor:
    if "d2t" not in made.tensors:
        return probs
    ids = torch.arange(probs.shape[1]) + made.tensors["d2t"]
    return torch.zeros(len(probs), make_eagle.V).index_copy(1, ids, probs)


def nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = probs.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
    return torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def assert_distributions_are_those_drawn_from(llm: LLM, made: Made, replay: Replay, logit_scale: float = 1) -> None:
    prompt = tiny_prompts()[4]
    (sequence,) = continued(llm, [prompt], SAMPLED)
    steps = proposer_of(llm).steps
    assert len(steps) > 4
    for length, draft in steps:
        count = int(draft.lengths[0])
        drawn = draft.token_ids[0, :count]
        if count == 0:
            continue
        _, logits = replay.run(sequence, length, count, drawn.tolist())
        expected = over_target_ids(nucleus((logit_scale * logits / 0.8).softmax(-1), 0.9), made)
        found = reported(draft, made)[:count]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert bool((found.gather(1, drawn[:, None]) > 0).all())


@pytest.mark.parametrize(
    ("make", "distribution"),
    [
        (safeailab_eagle1, "dense"),
        (speculators, "sparse"),
        (peagle, "dense"),
        (latent, "sparse"),
        (None, "sparse"),
        *(
            pytest.param(make, distribution, marks=pytest.mark.full)
            for make, distribution in [
                (safeailab_eagle1, "sparse"),
                (speculators, "dense"),
                (peagle, "sparse"),
                (None, "dense"),
            ]
        ),
        pytest.param(narrow, "sparse", marks=pytest.mark.full),
        pytest.param(narrow, "dense", marks=pytest.mark.full),
    ],
)
def test_reported_distribution_is_the_distribution_drawn_from(make, distribution, tmp_path):
    made = trained() if make is None else make(tmp_path / "draft").save()
    assert_distributions_are_those_drawn_from(engine(made, distribution), made, Replay(made, TargetStates()))


def test_a_shared_head_brings_the_targets_logit_scale(tmp_path):
    target = scaled_target(tmp_path / "target", 0.25)
    made = safeailab_eagle1(tmp_path / "draft").save()
    llm = engine(made, "dense", str(target))
    assert_distributions_are_those_drawn_from(llm, made, Replay(made, TargetStates(target)), logit_scale=0.25)


@pytest.mark.parametrize(
    ("make", "where"),
    [(safeailab_eagle1, None), (speculators, None), (wrapped_eagle1, "model")],
    ids=["targets-head", "own-head", "wrapped"],
)
def test_a_checkpoint_may_state_a_logit_scale_of_its_own(make, where, tmp_path):
    """It wins over the target's."""
    made = make(tmp_path / "draft")
    (made.config[where] if where else made.config)["logit_scale"] = 0.25
    target = scaled_target(tmp_path / "target", 2.0)
    llm = engine(made.save(), "dense", str(target))
    assert_distributions_are_those_drawn_from(llm, made, Replay(made, TargetStates(target)), logit_scale=0.25)


def scaled_target(path: Path, scale: float) -> Path:
    """The tiny target, its configuration with a factor that its own class does not read: only drafters apply it."""
    shutil.copytree(TINY / "target", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"logit_scale": scale}))
    return path


def test_greedy_rows_report_no_distribution(tmp_path):
    llm = engine(trained(), "sparse")
    continued(llm, tiny_prompts()[:2])
    steps = proposer_of(llm).steps
    assert steps
    assert all(draft.distribution is None for _, draft in steps)


@pytest.mark.parametrize("make", [peagle, None])
def test_a_head_in_another_dtype_keeps_its_rotary_frequencies(make, tmp_path):
    made = trained() if make is None else make(tmp_path / "draft").save()
    config = {"model": str(made.path), "num_speculative_tokens": 5, "dtype": "bfloat16"}
    llm = LLM("tiny", speculative_config=config, max_model_len=256)
    network = proposer_of(llm).network
    assert network.fc.weight.dtype == torch.bfloat16
    assert network.rotary.inv_freq.dtype == torch.float32
    assert continued(llm, tiny_prompts()[:2], GREEDY) == tiny_truth()[:2]
