"""Whether two instances answered the same, and what a draft distribution says over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from specdec.core.host import rejection
from specdec.sdk.needs import Needs
from specdec.sdk.types import DistributionKind, DraftDistribution

from .moves import Shown
from .rejection.reference import draft_distribution
from .rejection.tree_reference import left_of
from .report import DIFFERENCE, Violation
from .stage import Stage
from .subject import Subject

NUM_FRESH_ROWS = 32
DISTRIBUTION_TOLERANCE = 1e-4  # of a float32 network whose batch had another shape
MOST_AT_THE_EDGE = 0.01  # probability of a token that rounding may put on either side of a filter


def distribution_of(
    distribution: DraftDistribution | None, row: int, place: int, needs: Needs, vocab_size: int
) -> Tensor | None:
    """q at one place over target ids, float64 [V]; None where the row is one-hot."""
    if distribution is None:
        return None
    if distribution.sparse_ids is not None and distribution.kind[row] == DistributionKind.SPARSE:
        _require_in_vocabulary(distribution.sparse_ids[row, place], vocab_size)
    t2d = None
    if needs.draft_vocabulary is not None:
        t2d = torch.full((vocab_size,), -1)
        t2d[torch.tensor(needs.draft_vocabulary)] = torch.arange(len(needs.draft_vocabulary))
    distributions = rejection.DraftDistributions(
        distribution.kind,
        distribution.probs,
        distribution.logits,
        distribution.sparse_ids,
        distribution.sparse_probs,
        t2d,
    )
    return draft_distribution(distributions, row, place, vocab_size)


def _require_in_vocabulary(ids: Tensor, vocab_size: int) -> None:
    if int(ids.max()) >= vocab_size:
        raise Violation(
            expected=f"sparse_ids of 0 .. {vocab_size - 1}, and -1 for padding",
            found=f"id {int(ids.max())}",
            fix="report target ids; map those of a smaller draft vocabulary to the target's",
            cause="sparse_ids outside the vocabulary",
        )


def reported_by(stage: Stage, shown: Shown) -> Iterator[tuple[int, int, int, Tensor]]:
    """Row, position, drafted token and q [V] of every draft of a step whose distribution was reported.

    Siblings in a tree have one q: that of their place.
    """
    for row, draft in enumerate(shown.drafts):
        for position, token in enumerate(draft):
            place = shown.parents[row][position] + 1
            distribution = distribution_of(shown.distribution, row, place, stage.needs, stage.info.vocab_size)
            if distribution is not None:
                yield row, position, token, distribution


def distributions_of(stage: Stage, shown: Shown) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield what `reported_by` yields, with the distribution that each draft was drawn from, its earlier siblings taken
    out.
    """
    for row, position, token, distribution in reported_by(stage, shown):
        yield row, position, token, left_of(distribution, shown.earlier_siblings(row, position))


def require_same_steps(
    ones: Iterable[Shown], others: Iterable[Shown], stage: Stage, what: tuple[str, str], fix: str
) -> None:
    """Raise Violation unless every request of the others got the same draft in the same step of the ones."""
    for one, other in zip(ones, others, strict=True):
        for name in other.view.request_ids:
            require_same(one, other, name, stage, what, fix)


def require_same(
    one: Shown, other: Shown, names: str | tuple[str, str], stage: Stage, what: tuple[str, str], fix: str
) -> None:
    """Raise Violation unless both drafted the same for a request, from the same distributions. `what` names the two.

    `names`: the request's name, or its names in the one and in the other.
    """
    first, second = (names, names) if isinstance(names, str) else names
    drafts = (one.draft_of(first), other.draft_of(second))
    nodes = (one.nodes_of(first), other.nodes_of(second))
    if nodes[0] == nodes[1] and _same_distributions((one, first), (other, second), stage):
        return
    told = [f"{label}: {draft}" for label, draft in zip(what, drafts, strict=True)]
    if nodes[0] == nodes[1]:
        told.append("the tokens are equal, the reported distributions are not")
    elif drafts[0] == drafts[1]:
        told.append("the tokens are equal, the parents are not")
    raise Violation(
        expected=f"the same draft for {first!r} from {what[0]} and from {what[1]}",
        found="\n".join(told),
        where=one.where,
        fix=fix,
        cause=DIFFERENCE,
    )


def _same_distributions(one: tuple[Shown, str], other: tuple[Shown, str], stage: Stage) -> bool:
    rows = [shown.view.request_ids.index(name) for shown, name in (one, other)]
    for parent in set(one[0].parents[rows[0]]):
        first, second = (
            distribution_of(shown.distribution, row, parent + 1, stage.needs, stage.info.vocab_size)
            for (shown, _), row in zip((one, other), rows, strict=True)
        )
        if first is None or second is None:
            if first is not second:
                return False
        elif not are_alike(first, second):
            return False
    return True


def are_alike(first: Tensor, second: Tensor) -> bool:
    """Whether two distributions [V] are equal but for rounding, which decides on the last token that a filter keeps.

    Each may have one unlikely token that the other has not, and that is no likelier than all others.
    """
    both = (first > 0) & (second > 0)
    own = [each[(each > 0) & ~both] for each in (first, second)]  # what only one of them has
    if int(both.sum()) and max(map(len, own)) == 1:
        least = torch.minimum(first, second)[both].min()
        if torch.cat(own).max() <= min(float(least) + DISTRIBUTION_TOLERANCE, MOST_AT_THE_EDGE):
            first, second = (torch.where(both, each / each[both].sum(), 0) for each in (first, second))
    return torch.allclose(first, second, rtol=0, atol=DISTRIBUTION_TOLERANCE, equal_nan=True)


def first_difference(ones: Iterable[object], others: Iterable[object]) -> tuple[int, object, object]:
    """Where two unequal sequences differ first, and what each of them has there: "none" behind its end."""
    pairs = enumerate(zip_longest(ones, others, fillvalue="none"))
    return next((at, one, other) for at, (one, other) in pairs if one != other)


def with_fix(steps: Iterator[Shown], fix: str) -> Iterator[Shown]:
    """The same steps. An exception of the proposer gets this fix."""
    try:
        yield from steps
    except Violation as violation:
        if violation.cause == DIFFERENCE:
            raise
        told = {label: value for label, value in violation.facts.items() if label != "fix"}
        raise Violation(**told, fix=fix, cause=violation.cause) from violation


class FreshPrefill:
    """A second instance, which is shown each request's tokens as one prefill and must draft the same."""

    FIX = "derive the draft from the committed tokens alone: undo what rejected drafts left, catch up on skipped steps"
    AFTER_PREEMPTION = (
        "\na request was preempted: in on_preempt(request) drop what lies in its row and what is counted by position;"
        "\nits tokens are shown again from position 0 (kept.kept_start), so take in none of them twice"
    )
    AFTER_AN_END = (
        "\nan id came back: in on_finish(request) drop what is kept under it, and call super().on_finish(request) "
        "where a base keeps something"
    )

    WHERE_LENGTHS_DIFFER = (
        "\nif its length follows what was accepted before, as in Adaptive, hold it by an option while you check"
    )

    def __init__(self, subject: Subject, *, probabilistic: bool, anew: bool = False) -> None:
        """anew: an instance for each comparison, which has seen no request before: ids come back."""
        self._subject = subject
        self._probabilistic = probabilistic
        self._anew = anew or subject.needs.state == "shared"
        self._after_an_end = self.AFTER_AN_END if anew else ""
        self._stage: Stage | None = None

    def require(self, stage: Stage, shown: Shown) -> None:
        """Compare every draft of the step. Raises Violation."""
        for name, budget in zip(shown.view.request_ids, shown.budgets, strict=True):
            if budget:
                fresh_stage = self._fresh_stage()
                fresh_name = f"{name} again {fresh_stage.number}"
                fresh = fresh_stage.prefill_of(stage.requests[name], fresh_name)
                what = ("this history", "a fresh prefill of the same tokens")
                fix = self.FIX + (self.AFTER_PREEMPTION if stage.num_preemptions else "") + self._after_an_end
                pairs = zip(shown.nodes_of(name), fresh.nodes_of(fresh_name), strict=False)
                equal = [one == other for one, other in pairs]
                fix += self.WHERE_LENGTHS_DIFFER if equal and all(equal) else ""
                require_same(shown, fresh, (name, fresh_name), stage, what, fix)

    def _fresh_stage(self) -> Stage:
        """Make a stage with a row that no request has used. It is empty where requests may influence each other."""
        if self._stage is None or not self._stage.num_free_rows or self._anew:
            if self._stage is not None:
                self._subject.close([self._stage])
            self._stage = self._subject.stage(probabilistic=self._probabilistic, max_num_seqs=NUM_FRESH_ROWS)
        return self._stage
