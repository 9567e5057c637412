"""What is no distribution at all is refused, however many were right before."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import make_llm, tokens

from specdec import LLM, SamplingParams
from specdec.core.proposing.draft_check import DraftChecker
from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs, ProposerError
from specdec.sdk.errors import PluginId
from specdec.testing import step_view

V, K = 11, 2
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, seed=3, ignore_eos=True)


def draft_of(kind, values):
    """Two requests, whose second place is not drafted: anything may stand there."""
    kinds = torch.full((2,), int(kind), dtype=torch.uint8)
    name = "logits" if kind == DistributionKind.DENSE_LOGITS else "probs"
    distribution = DraftDistribution(kind=kinds, **{name: values})
    return Draft(torch.zeros(2, K, dtype=torch.int64), torch.ones(2, dtype=torch.int64), distribution=distribution)


class Checks:
    """One checker that is given one draft after the other."""

    def __init__(self, placement):
        needs = Needs(placement=placement, distributions=("dense",))
        self.checker = DraftChecker(PluginId("mine", "m:Mine"), needs, V, torch.device("cpu"))
        self.step = step_view([[1, 2, 3]] * 2, K)

    def check(self, draft):
        return self.checker.check(draft, self.step, [K] * 2)


def right(kind):
    values = torch.full((2, K, V), 1 / V)
    values[:, 1] = torch.nan
    return draft_of(kind, values.log() if kind == DistributionKind.DENSE_LOGITS else values)


def wrong(kind, value):
    draft = right(kind)
    held = draft.distribution.logits if kind == DistributionKind.DENSE_LOGITS else draft.distribution.probs
    held[1, 0, 5] = value
    return draft


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (DistributionKind.DENSE_PROBS, -5.0, "least entry -5"),
        (DistributionKind.DENSE_PROBS, torch.nan, "1 not finite"),
        (DistributionKind.DENSE_PROBS, 0.3, "sum 1.2"),
        (DistributionKind.DENSE_LOGITS, torch.nan, "the largest logit is nan"),
        (DistributionKind.DENSE_LOGITS, torch.inf, "the largest logit is inf"),
    ],
)
def test_every_one_is_looked_at_on_the_host(placement, kind, value, said):
    checks = Checks(placement)
    for _ in range(20):
        checks.check(right(kind))
    with pytest.raises(ProposerError, match="SD-E205") as raised:
        checks.check(wrong(kind, value))
    assert said in str(raised.value)
    assert "request 'request-1', draft position 0" in str(raised.value)


def test_a_mask_may_leave_logits_that_are_minus_infinity_but_not_all_of_them():
    logits = torch.full((2, K, V), -torch.inf)
    logits[:, :, 0] = 0.0
    Checks("host").check(draft_of(DistributionKind.DENSE_LOGITS, logits))
    logits[0, 0, 0] = -torch.inf
    with pytest.raises(ProposerError, match="the largest logit is -inf"):
        Checks("host").check(draft_of(DistributionKind.DENSE_LOGITS, logits))


class Learns:
    """Drafts with gradients, as a proposer that learns while it serves."""

    needs = Needs(distributions=("dense",))

    def __init__(self, config):
        with torch.inference_mode(False):
            self.weights = torch.nn.Parameter(torch.zeros(4096))

    def propose(self, step):
        with torch.inference_mode(False), torch.enable_grad():
            probs = self.weights.softmax(0).expand(len(step), step.width, -1)
            kind = torch.full((len(step),), int(DistributionKind.DENSE_PROBS), dtype=torch.uint8)
            ids = torch.full((len(step), step.width), 7, dtype=torch.int64)
            return Draft(ids, step.budget.clone(), distribution=DraftDistribution(kind=kind, probs=probs))


def test_a_distribution_that_carries_gradients_is_one_like_any_other():
    llm = make_llm(f"{__name__}:Learns", k=K, speculative={"draft_sample_method": "probabilistic"})
    assert len(tokens(llm.generate([{"prompt_token_ids": [5, 6, 7]}], SAMPLED))[0]) == 12


def test_the_fix_names_the_type_that_is_asked_for():
    draft = right(DistributionKind.DENSE_PROBS)
    draft.distribution.__dict__["kind"] = draft.distribution.kind.long()
    with pytest.raises(ProposerError, match=r"SD-E201(?s:.*)distribution.kind.to\(torch.uint8\)"):
        Checks("host").check(draft)


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "tiny/eagle3", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
        {"model": "tiny/medusa", "num_speculative_tokens": 3, "max_nodes": 8},
    ],
    ids=["distributions", "trees"],
)
def test_an_engine_that_was_made_in_inference_mode_steps_outside_of_it(asked):
    """As where one thread makes it, and another one uses it."""
    with torch.inference_mode():
        llm = LLM("tiny", device="cpu", speculative_config=asked, max_model_len=128)
    output = llm.generate("def read_lines(path):", SAMPLED)[0].outputs[0]
    assert output.finish_reason == "length"
    assert output.spec_decode_metrics["num_draft_tokens"] > 0
