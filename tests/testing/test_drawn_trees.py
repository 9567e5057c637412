"""The kit checks drawn trees: where they hang, what they are drawn from, and the exact distribution of the output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.sdk import Draft, Needs, ProposerConfig, StepView, TargetInfo
from specdec.sdk.model_proposer import AutoregressiveProposer, DraftInputs
from specdec.testing import check_proposer

SETTINGS = {"num_speculative_tokens": 2, "max_nodes": 3, "draft_sample_method": "probabilistic"}
WIDTH = 8


class Network(AutoregressiveProposer):
    """Logits that depend on every token of a path."""

    DRAFTS_TREES = True
    INPUTS_ARE_SHIFTED = True

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return cls.shared_needs(config, target)

    def build(self) -> None:
        generator = torch.Generator().manual_seed(5)
        vocab_size = self.target.vocab_size
        self.table = torch.randn(vocab_size, WIDTH, generator=generator)
        self.out = torch.randn(WIDTH, vocab_size, generator=generator)

    def first(self, inputs: DraftInputs) -> Tensor:
        return self.table[inputs.token_ids[inputs.last]]

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        return 0.5 * states + self.table[inputs.token_ids]

    def logits(self, states: Tensor) -> Tensor:
        return 0.6 * states @ self.out


class Drops(Network):
    """Leaves the second sibling out if its id is odd."""

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        if draft.parents is None or draft.distribution is None:
            return draft
        token_ids, parents = draft.token_ids.clone(), draft.parents.clone()
        siblings = (draft.lengths == 3) & (parents[:, 1] == -1) & (token_ids[:, 1] % 2 == 1)
        token_ids[siblings, 1], parents[siblings, 1] = token_ids[siblings, 2], 0
        token_ids[siblings, 2], parents[siblings, 2] = -1, -1
        return replace(draft, token_ids=token_ids, parents=parents, lengths=draft.lengths - siblings.long())


class Reranks(Network):
    """Cuts the last node if it is unlikely."""

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        odd = (draft.lengths == 3) & (draft.token_ids[:, 2] % 2 == 1)
        return replace(draft, lengths=draft.lengths - odd.long())


class SaysWithReplacement(Network):
    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        said = draft.distribution and replace(draft.distribution, replacement=True)
        return replace(draft, distribution=said)


class SortsSiblings(Network):
    """Drafts two siblings, the lower id first."""

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        token_ids, pairs = draft.token_ids.clone(), draft.lengths >= 2
        token_ids[pairs, :2] = token_ids[pairs, :2].sort(dim=1).values
        return replace(draft, token_ids=token_ids, lengths=draft.lengths.clamp(max=2))


class ReportsTheRootEverywhere(Network):
    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        if draft.distribution is None or draft.distribution.sparse_ids is None:
            return draft
        ids, probs = draft.distribution.sparse_ids.clone(), draft.distribution.sparse_probs.clone()
        ids[:, 1:], probs[:, 1:] = ids[:, :1], probs[:, :1]
        return replace(draft, distribution=replace(draft.distribution, sparse_ids=ids, sparse_probs=probs))


class GrowsWhereItsTokenSays(Network):
    """The third node hangs from the first or the second, as its own token is odd or even."""

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        if draft.parents is None or draft.distribution is None or draft.distribution.sparse_ids is None:
            return draft
        ids, probs = draft.distribution.sparse_ids.clone(), draft.distribution.sparse_probs.clone()
        parents = draft.parents.clone()
        moved = (draft.lengths == 3) & (draft.token_ids[:, 2] % 2 == 1)
        parents[moved, 2], ids[:, 2], probs[:, 2] = 1, ids[:, 1], probs[:, 1]
        said = replace(draft.distribution, sparse_ids=ids, sparse_probs=probs)
        return replace(draft, parents=parents, distribution=said)


CHECKS = (
    "draft_form",
    "distribution_is_a_distribution",
    "length_ignores_the_draw",
    "distribution_ignores_the_draw",
    "drawn_distribution_is_reported_distribution",
    "output_distribution_is_exact",
)


@pytest.mark.full
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_a_good_proposer_of_drawn_trees_passes(form: str) -> None:
    results = check_proposer(Network, SETTINGS | {"draft_distribution": form}, only=CHECKS)
    assert [each.text for each in results if each.status != "passed"] == []


@pytest.mark.full
def test_a_good_proposer_of_drawn_trees_passes_every_check() -> None:
    assert [each.text for each in check_proposer(Network, SETTINGS, level="full") if not each.ok] == []


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        (Drops, "length_ignores_the_draw", "other random numbers"),
        (Reranks, "length_ignores_the_draw", "other random numbers"),
        (GrowsWhereItsTokenSays, "length_ignores_the_draw", "other random numbers"),
        (Drops, "distribution_ignores_the_draw", "other uniforms"),
        (Reranks, "output_distribution_is_exact", "for every random number, or for none"),
        (GrowsWhereItsTokenSays, "output_distribution_is_exact", "after the same node for every random number"),
        (ReportsTheRootEverywhere, "distribution_is_a_distribution", "SD-E206"),
    ],
)
def test_a_fault_in_drawn_trees_is_seen(fault: type, check: str, said: str) -> None:
    (result,) = check_proposer(fault, SETTINGS, only=[check])
    assert result.status == "failed"
    assert said in result.text


@pytest.mark.slow
@pytest.mark.parametrize("fault", [SaysWithReplacement, SortsSiblings, ReportsTheRootEverywhere])
def test_a_fault_that_changes_the_output_is_seen(fault: type) -> None:
    (result,) = check_proposer(fault, SETTINGS, only=["output_distribution_is_exact"])
    assert result.status == "failed"
    assert "total variation" in result.text
