"""Draft distributions: what verification trusts. A wrong distribution changes what is generated, and nothing else
would notice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.core.host import SUM_TOLERANCE
from specdec.sdk.errors import SpecdecError
from specdec.sdk.types import DistributionKind

from ..compare import DISTRIBUTION_TOLERANCE, distributions_of, reported_by
from ..drawn_tree import NUM_TWINS, twins
from ..exact_output import require_exact_output
from ..moves import Shown
from ..places import NUM_REQUESTS, draw_places
from ..report import Violation
from ..schedules import lockstep
from ..stage import Stage
from ..subject import Subject
from ..worlds import FewTokens, World
from .check import check

FALSE_ALARM_RATE = 1e-6
Nodes = tuple[tuple[int, int], ...]  # (parent, token) of each


@check("standard")
def distribution_is_a_distribution(subject: Subject) -> None:
    """A reported distribution is finite, nowhere negative, sums to 1, and gives the drafted token a probability above
    0.
    """
    subject.need_distribution()
    stage = subject.stage(probabilistic=True)
    for shown in lockstep(stage):
        for row, position, token, distribution in reported_by(stage, shown):
            total, lowest, drafted = float(distribution.sum()), float(distribution.min()), float(distribution[token])
            if abs(total - 1) <= _tolerance(shown) and lowest >= 0 and drafted > 0:
                continue
            raise Violation(
                expected=f"probabilities of at least 0 that sum to 1 within {_tolerance(shown):g}, q({token}) above 0",
                found=f"sum {total:.6f}, least entry {lowest:.4g}, q({token}) = {drafted:.4g}",
                where=f"{shown.where}; row {row}, draft position {position}",
                fix="report what was drawn from: after temperature, filters and renormalising, in target ids",
            )


def _tolerance(shown: Shown) -> float:
    assert shown.distribution is not None, "a distribution was read from it"
    parts = (shown.distribution.probs, shown.distribution.logits, shown.distribution.sparse_probs)
    return max(SUM_TOLERANCE[part.dtype] for part in parts if part is not None)


@check("standard")
def length_ignores_the_draw(subject: Subject) -> None:
    """With a reported distribution, a position is drafted or not by what stands before it, never by its own token. The
    same holds for the parent of a node.
    """
    subject.need_distribution()
    subject.need_determinism()
    for _, shown in _twins(subject):
        _require_one_answer(shown)


def _require_one_answer(shown: Shown) -> None:
    groups: dict[Nodes, dict[int | None, Nodes]] = {}
    for row, draft in enumerate(shown.drafts):
        for position in range(min(len(draft) + 1, shown.budgets[row])):
            parent = shown.parents[row][position] if position < len(draft) else None
            groups.setdefault(shown.before(row, position), {})[parent] = shown.before(row, len(draft))
    for prefix, drafts in groups.items():
        if len(drafts) > 1 and _has_distribution(shown):
            one, other, *_ = (_describe(shown, nodes) for nodes in drafts.values())
            raise Violation(
                expected=f"after the drafts {_describe(shown, prefix)}, a next one in every request with this text "
                "or in none; in a tree, after the same node",
                found=f"drafts {one} and {other}: the same text, other random numbers",
                where=shown.where,
                fix="decide from q before you draw, not from q(token) after it: trimming unlucky tokens changes "
                "what is generated; or report no distribution",
            )


@check("standard")
def distribution_ignores_the_draw(subject: Subject) -> None:
    """The distribution of a draft depends on what stands before it: requests with the same text report the same
    distribution.
    """
    subject.need_distribution()
    subject.need_determinism()
    for stage, shown in _twins(subject):
        seen: dict[Nodes, Tensor] = {}
        for row, position, _, distribution in distributions_of(stage, shown):
            prefix = shown.before(row, position)
            known = seen.setdefault(prefix, distribution)
            if not torch.allclose(known, distribution, rtol=0, atol=DISTRIBUTION_TOLERANCE, equal_nan=True):
                raise Violation(
                    expected=f"one distribution after the drafts {_describe(shown, prefix)}, whatever is drawn from it",
                    found=f"two distributions, {float((known - distribution).abs().max()):.3g} apart: "
                    "the same text, other uniforms",
                    where=f"{shown.where}; row {row}, draft position {position}",
                    fix="compute and report q before you draw; never change it for the token that was drawn",
                )


def _describe(shown: Shown, nodes: Nodes) -> list[int] | list[tuple[int, int]]:
    """Tokens of a chain, (parent, token) of a tree."""
    is_chain = all(parents == [*range(-1, len(parents) - 1)] for parents in shown.parents)
    return [token for _, token in nodes] if is_chain else list(nodes)


def _has_distribution(shown: Shown) -> bool:
    return shown.distribution is not None and bool((shown.distribution.kind != DistributionKind.ONE_HOT).any())


def _twins(subject: Subject) -> Iterator[tuple[Stage, Shown]]:
    """Steps in which every request has the same text and random numbers of its own.

    Also on a few tokens, if it runs there: then several requests draw the same first drafts.
    """
    worlds: list[World] = [subject.target]
    worlds += [FewTokens()] if subject.resolved.model is None else []
    for world in worlds:
        try:
            stage = subject.stage(probabilistic=True, world=world, max_num_seqs=NUM_TWINS)
            steps = [twins(stage, stage.script.prompt(f"text {length}", length)) for length in (9, 16, 30)]
        except (SpecdecError, Violation):
            if world is subject.target:
                raise
            continue
        yield from ((stage, shown) for shown in steps)


@check("full")
def drawn_distribution_is_reported_distribution(subject: Subject) -> None:
    """Drafts are drawn from the distribution that is reported, each by a random number of its own.

    The place of a drafted token in the reported distribution is a uniform number, independent of the one before it,
    if and only if the token was drawn from that distribution. Both are tested by bounds that hold for every sample
    size (Dvoretzky, Kiefer, Wolfowitz, Massart; Azuma, Hoeffding): the false-alarm rate is 1e-6 in all. A shift of 7
    % of the mass is seen, and of twice as much at one of four draft positions.
    """
    subject.need_distribution()
    sample = draw_places(subject.stage(probabilistic=True, max_num_seqs=NUM_REQUESTS))
    failed = [told for told in sample.statements(FALSE_ALARM_RATE) if not told.holds]
    if failed:
        raise Violation(
            expected="\n".join(f"{each.name} at most {each.limit:.3f}" for each in failed)
            + f"\n{len(sample.by_rank)} drafts, false-alarm rate {FALSE_ALARM_RATE:g}",
            found="\n".join(f"{each.name} {each.found:.3f}" for each in failed),
            fix="draw token i with step.random.uniform(i) from exactly what is reported: after temperature, "
            "filters, rounding and the vocabulary map",
        )


@check("full")
def output_distribution_is_exact(subject: Subject) -> None:
    """Verification of its drafts gives exactly the target's distribution.

    On a vocabulary of four tokens the distribution that drafts are drawn from is measured by bisection of the random
    numbers. The rules of verification are enumerated with what is reported: no sampling, no false alarm. One-hot drafts
    are lossless whatever drew them, and shown to be.
    """
    require_exact_output(subject)
