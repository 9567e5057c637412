"""What is expected of drawn drafts is what live steps commit: by enumeration of every text and every draft."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from specdec.core.rejection.types import NO_PROPOSAL, DistributionKind, DraftDistributions, DraftRows
from specdec.lab.recording import RecordedRequest
from specdec.lab.replay.expected import ExpectedAcceptance

TOKENS, LENGTH = 3, 3
START = 0  # the token before the step
P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.05, 0.15, 0.8]], dtype=torch.float64)  # by the token before
Q = torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.4, 0.2], [0.3, 0.3, 0.4]], dtype=torch.float64)
CHAINS = list(product(range(TOKENS), repeat=LENGTH))


def steps_of(chain):
    """Each token of a chain with the one before it."""
    return zip((START, *chain), chain, strict=False)


def probability(table, chain):
    return prod(float(table[before, token]) for before, token in steps_of(chain))


def live_tokens():
    """1 and each draft that is accepted with all before it."""
    tokens = 1.0
    for chain in CHAINS:
        ratios = [min(1.0, float(P[step] / Q[step])) for step in steps_of(chain)]
        tokens += probability(Q, chain) * sum(prod(ratios[: place + 1]) for place in range(LENGTH))
    return tokens


def recorded(text, top_m=TOKENS) -> RecordedRequest:
    """A text with its probabilities in the target."""
    rows = torch.stack([P[before] for before, _ in steps_of(text)])
    top = rows.topk(top_m)
    said = rows.gather(1, torch.tensor(text)[:, None]).squeeze(1)
    return RecordedRequest(
        request_id="r",
        number=0,
        prompt_id="r",
        turn=0,
        category="c",
        prompt=None,
        text="",
        seed=0,
        prompt_token_ids=(START,),
        token_ids=text,
        past_token_ids=(),
        finish_reason="length",
        top_ids=top.indices,
        top_logprobs=top.values.log(),
        token_logprobs=said.log(),
        tail_mass=1 - top.values.sum(-1),
        entropy=torch.zeros(len(text)),
    )


def drawn(*chains, kind=DistributionKind.DENSE_PROBS) -> DraftRows:
    """Drafts of several requests with the distributions that they were drawn from."""
    rows = torch.stack([torch.stack([Q[before] for before, _ in steps_of(chain)]) for chain in chains])
    probs = {"draft_probs": rows} if kind == DistributionKind.DENSE_PROBS else {"draft_logits": rows.log()}
    kinds = torch.full((len(chains),), kind, dtype=torch.uint8)
    lengths = torch.full((len(chains),), LENGTH)
    return DraftRows(torch.tensor(chains), lengths, DraftDistributions(kinds, **probs))


def reached(text, chain):
    """Places that a replay gets to: those behind drafts that are the text."""
    same = [said == draft for said, draft in zip(text, chain, strict=True)]
    return (same.index(False) if False in same else LENGTH) + 1


def expected_of(text, chain, top_m=TOKENS):
    expected = ExpectedAcceptance(top_m)
    expected.record(drawn(chain), [(recorded(text, top_m), 0)], [reached(text, chain)])
    return expected.tokens_per_step()


def test_the_expectation_over_texts_and_drafts_is_that_of_a_live_step():
    mean = sum(
        probability(P, text) * probability(Q, chain) * expected_of(text, chain)[0]
        for text, chain in product(CHAINS, CHAINS)
    )
    assert mean == pytest.approx(live_tokens(), abs=1e-6)


def test_bounds_of_a_recording_with_fewer_probabilities_hold_the_live_step():
    bounds = [0.0, 0.0]
    for text, chain in product(CHAINS, CHAINS):
        weight = probability(P, text) * probability(Q, chain)
        for side, value in enumerate(expected_of(text, chain, top_m=1)):
            bounds[side] += weight * value
    assert bounds[0] < live_tokens() < bounds[1]


def test_steps_that_do_not_match_the_text_count_too():
    expected = ExpectedAcceptance(TOKENS)
    text, far = (0, 0, 0), (2, 2, 2)
    for chain in (text, far):
        expected.record(drawn(chain), [(recorded(text), 0)], [reached(text, chain)])
    alone, other = expected_of(text, text)[0], expected_of(text, far)[0]
    assert expected.tokens_per_step()[0] == pytest.approx((alone + other) / 2)


def test_logits_of_several_requests_are_those_of_each():
    texts = [(0, 1, 1), (2, 2, 1)]
    together = ExpectedAcceptance(TOKENS)
    rows = [(recorded(text), 0) for text in texts]
    together.record(drawn(*texts, kind=DistributionKind.DENSE_LOGITS), rows, [LENGTH + 1] * 2)
    alone = [expected_of(text, text)[0] for text in texts]
    assert together.tokens_per_step()[0] == pytest.approx(sum(alone) / 2)


def test_a_one_hot_draft_is_accepted_as_often_as_the_target_says_it():
    chain = (1, 1, 0)
    one_hot = DraftRows(
        torch.tensor([chain]), torch.tensor([LENGTH]), DraftDistributions(torch.zeros(1, dtype=torch.uint8))
    )
    mean = 0.0
    for text in CHAINS:
        expected = ExpectedAcceptance(TOKENS)
        expected.record(one_hot, [(recorded(text), 0)], [reached(text, chain)])
        mean += probability(P, text) * expected.tokens_per_step()[0]
    live = 1 + sum(probability(P, chain[: place + 1]) for place in range(LENGTH))
    assert mean == pytest.approx(live, abs=1e-6)


def test_nothing_is_accepted_where_nothing_was_proposed():
    drafts = drawn((0, 0, 0))
    drafts.token_ids[0, 1] = NO_PROPOSAL
    expected = ExpectedAcceptance(TOKENS)
    expected.record(drafts, [(recorded((0, 0, 0)), 0)], [2])
    assert len(expected.positions) == 1
