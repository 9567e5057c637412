"""The lossy rules do what they say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.rejection import DistributionKind, DraftRows
from specdec.lab.lossy_rules import typical, verify_synthetic, verify_typical
from specdec.testing.rejection.reference import Params

from .batches import Shape, random_batch
from .problems import sampling_rows

ONE_HOT = Shape(kinds=(DistributionKind.ONE_HOT,))


@pytest.mark.parametrize("values", [[0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.2, 0.2, 0.08, 0.08, 0.04]], ids=len)
def test_typical_acceptance_compares_with_the_entropy_of_the_row(values: list[float]) -> None:
    probs = torch.tensor(values)
    bar = min(0.09, 0.3 * math.exp(float((probs * probs.log()).sum())))
    logits = probs.log().expand(2, len(values)).clone()
    for token, p in enumerate(probs.tolist()):
        drafts = DraftRows(torch.tensor([[token]]), torch.tensor([1]))
        verdict = verify_typical(logits, torch.tensor([0, 2]), drafts, sampling_rows([Params()]))
        assert int(verdict.num_accepted) == (p > bar)


@pytest.mark.parametrize("rates", [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
def test_synthetic_rates_of_zero_and_one_are_certain(rates: list[float]) -> None:
    for seed in range(5):
        batch = random_batch(seed, replace(ONE_HOT, greedy=0.0, holes=False, idle=0.0))
        logits = batch.logits.nan_to_num(neginf=-9.0)  # no token is barred
        verdict = verify_synthetic(logits, batch.cu_rows, batch.drafts, batch.sampling, torch.tensor(rates))
        certain = rates.index(0.0) if 0.0 in rates else 3
        assert torch.equal(verdict.num_accepted, batch.drafts.lengths.clamp(max=certain))


def test_synthetic_rates_accept_no_barred_token() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = -torch.inf
    drafts = DraftRows(torch.tensor([[2, 2]]), torch.tensor([2]))
    verdict = verify_synthetic(logits, torch.tensor([0, 3]), drafts, sampling_rows([Params()]), torch.ones(2))
    assert int(verdict.num_accepted) == 1
    assert int(verdict.output_ids[0, 1]) != 2


def test_synthetic_rate_is_the_share_that_is_accepted() -> None:
    count = 4000
    drafts = DraftRows(torch.zeros(count, 1, dtype=torch.int64), torch.ones(count, dtype=torch.int64))
    sampling = sampling_rows([Params()] * count)
    logits, cu_rows = torch.zeros(2 * count, 3), 2 * torch.arange(count + 1)
    verdict = verify_synthetic(logits, cu_rows, drafts, sampling, torch.tensor([0.7]))
    assert abs(float(verdict.num_accepted.double().mean()) - 0.7) < 4 * (0.21 / count) ** 0.5


@pytest.mark.parametrize("vocab_size", [2, 64])
@pytest.mark.parametrize(("delta", "accepts"), [(0.95, 1), (1.05, 0)])
def test_a_flat_row_accepts_its_tokens_where_delta_is_below_one(vocab_size: int, delta: float, accepts: int) -> None:
    """Of V equal tokens each has the probability exp(-H)."""
    drafts = DraftRows(torch.tensor([[vocab_size - 1]]), torch.tensor([1]))
    arguments = torch.zeros(2, vocab_size), torch.tensor([0, 2]), drafts, sampling_rows([Params()])
    assert int(verify_typical(*arguments, epsilon=1.0, delta=delta).num_accepted) == accepts


def test_a_lossy_rule_takes_no_tree() -> None:
    batch = random_batch(17, ONE_HOT)
    drafts = replace(batch.drafts, parents=torch.full_like(batch.drafts.token_ids, -1))
    rule = typical(SpeculativeConfig(method="any"))
    with pytest.raises(ValueError, match="no trees"):
        rule(batch.logits, batch.cu_rows, drafts, batch.sampling)
