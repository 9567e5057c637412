"""Trees for the requests of one step: of the likeliest nodes where a request is greedy, drawn where it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..types import Draft, StepView
from .base import ModelProposer
from .sampling import DraftSampler

Grow = Callable[[StepView, Tensor | None, DraftSampler], tuple[Tensor, ...]]
"""(step, the places in it that want drafts or None for all, their sampler): what `draft_of_trees` takes."""


def draft_trees(proposer: ModelProposer, step: StepView, grow: Grow) -> Draft:
    """A tree for every request with a budget.

    Greedy requests and sampled ones grow in different ways. So each kind is grown by itself, and no request's tree
    depends on the others. On a device the host does not know which is which: a step with a sampled request is drawn.
    """
    if proposer.most_wanted(step) == 0:
        return proposer.sampler(step, None).draft()
    if step.sampling is None or step.sampling.all_greedy or step.budget.device.type != "cpu":
        return _grown(proposer, step, proposer.wanted(step), grow)
    assert step.sampling.temperature is not None, "a proposer that reports a distribution declares it"
    wanted, sampled = step.budget > 0, step.sampling.temperature > 0
    to_draw, others = (wanted & sampled).nonzero()[:, 0], (wanted & ~sampled).nonzero()[:, 0]
    if not len(others):
        return _grown(proposer, step, to_draw, grow)
    greedy = _grown(proposer, replace(step, sampling=None), others, grow)
    return _merged(greedy, _grown(proposer, step, to_draw, grow)) if len(to_draw) else greedy


def _grown(proposer: ModelProposer, step: StepView, chosen: Tensor | None, grow: Grow) -> Draft:
    sampler = proposer.sampler(step, chosen)
    return sampler.draft_of_trees(*grow(step, chosen, sampler))


def _merged(greedy: Draft, drawn: Draft) -> Draft:
    """One draft of two. Each has no nodes in the rows of the other: there it is padded with -1, the least id."""
    assert greedy.parents is not None, "both are trees"
    assert drawn.parents is not None, "both are trees"
    return replace(
        drawn,
        token_ids=torch.maximum(greedy.token_ids, drawn.token_ids),
        lengths=greedy.lengths + drawn.lengths,
        parents=torch.maximum(greedy.parents, drawn.parents),
        confidence=_known(greedy.confidence, drawn.confidence),
    )


def _known(greedy: Tensor | None, drawn: Tensor | None) -> Tensor | None:
    """Of both, what is no NaN."""
    if greedy is None or drawn is None:
        return greedy if drawn is None else drawn
    return torch.fmax(greedy, drawn)
