"""Merges parts: what they need of the engine, and what they drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import Refusal
from ..extensions import Extension, Trees
from ..needs import Needs, SamplingField
from ..types import PADDING_TOKEN_ID, DistributionKind, Draft, DraftDistribution
from .part import PartPlan

STATES = ("none", "per_request", "shared")  # each one includes those before it


def merged_needs(plans: Sequence[PartPlan]) -> Needs:
    """What all parts together need. Raises Refusal where two of them exclude each other."""
    needs = [plan.needs for plan in plans]
    limits = [each.max_draft_tokens for each in needs]
    trees = [plan.name for plan in plans if plan.needs.extension(Trees)]
    if trees:
        raise Refusal(f"its part {trees[0]} drafts trees", "parts that draft chains: leave max_nodes out")
    sampling = {field for each in needs for field in each.sampling}
    forms = _distribution_forms(plans)
    return Needs(
        placement="device" if any(each.placement == "device" for each in needs) else "host",
        hidden_states=tuple(dict.fromkeys(layer for each in needs for layer in each.hidden_states)),
        distributions=forms,
        sparse_top_m=max(each.sparse_top_m for each in needs),
        draft_vocabulary=_draft_vocabulary(plans) if "dense" in forms else None,
        min_draft_tokens=min(each.min_draft_tokens for each in needs),
        max_draft_tokens=None if None in limits else max(limit for limit in limits if limit is not None),
        state=max((each.state for each in needs), key=STATES.index),
        history=any(each.history for each in needs),
        whole_prompt=any(each.whole_prompt for each in needs),
        sampling=tuple(field for field in get_args(SamplingField) if field in sampling),
        deterministic=all(each.deterministic for each in needs),
        extensions=_united(plans),
    )


def _united(plans: Sequence[PartPlan]) -> tuple[Extension, ...]:
    """Every extension that a part asks for, with settings that serve all who do."""
    united: dict[str, Extension] = {}
    whose: dict[str, str] = {}
    asked = [(plan.name, each) for plan in plans for each in plan.needs.asked]
    for name, each in asked:
        try:
            united[each.id] = united[each.id].united(each) if each.id in united else each
        except Refusal as refusal:
            raise Refusal(f"{whose[each.id]} and {name}: {refusal.reason}", refusal.what_would_work) from None
        whose[each.id] = name
    return tuple(united.values())


def _distribution_forms(plans: Sequence[PartPlan]) -> tuple[Literal["dense", "sparse"], ...]:
    forms = {form: plan.name for plan in plans for form in plan.needs.distributions}
    if len(forms) > 1:
        found = " and ".join(f"{form} ones ({name})" for form, name in forms.items())
        raise Refusal(
            f"its parts report draft distributions of two forms: {found}", "parts that report distributions of one form"
        )
    return tuple(forms)


def _draft_vocabulary(plans: Sequence[PartPlan]) -> tuple[int, ...] | None:
    dense = [plan for plan in plans if "dense" in plan.needs.distributions]
    first = dense[0].needs.draft_vocabulary
    if any(plan.needs.draft_vocabulary != first for plan in dense):
        sizes = (f"{plan.name}: {_size(plan.needs.draft_vocabulary)}" for plan in dense)
        reason = f"its parts report dense distributions over different draft vocabularies ({', '.join(sizes)})"
        raise Refusal(reason, 'sparse distributions, or "draft_sample_method": "greedy"')
    return first


def _size(vocabulary: tuple[int, ...] | None) -> str:
    return "the target's" if vocabulary is None else f"{len(vocabulary)} tokens"


@dataclass(frozen=True)
class Piece:
    """A part's draft, and the rows that it is used in."""

    draft: Draft
    used: Tensor | Sequence[bool]  # [B]

    @property
    def rows(self) -> Tensor:
        """[B] bool"""
        return torch.as_tensor(self.used, device=self.draft.lengths.device)


def merged_draft(pieces: Sequence[Piece], num_requests: int, whole: Needs, width: int, device: torch.device) -> Draft:
    """One draft [B, width] with each row and its distribution from the piece that uses it; the rows of no piece are
    empty.
    """
    if len(pieces) == 1 and pieces[0].draft.token_ids.shape[1] == width and pieces[0].draft.distribution is None:
        return pieces[0].draft  # rows that it does not draft have no length
    token_ids = torch.full((num_requests, width), PADDING_TOKEN_ID, device=device)
    lengths = torch.zeros(num_requests, dtype=torch.int64, device=device)
    for piece in pieces:
        ids = pad(piece.draft.token_ids, (0, width - piece.draft.token_ids.shape[1]), value=PADDING_TOKEN_ID)
        token_ids = torch.where(piece.rows[:, None], ids, token_ids)
        lengths = torch.where(piece.rows, piece.draft.lengths, lengths)
    return Draft(token_ids, lengths, distribution=_merged_distribution(pieces, whole, width))


def _merged_distribution(pieces: Sequence[Piece], whole: Needs, width: int) -> DraftDistribution | None:
    reported = [(piece, piece.draft.distribution) for piece in pieces if piece.draft.distribution is not None]
    if not reported:
        return None
    kind = torch.full_like(reported[0][1].kind, int(DistributionKind.ONE_HOT))
    merged: dict[str, Any] = {}
    for piece, distribution in reported:
        kind = torch.where(piece.rows, distribution.kind, kind)
        for name, values in _widened_distribution(distribution, whole, width).items():
            # Rows that use another piece never read these: only where two pieces have the field must they be mixed.
            used = piece.rows[:, None, None]
            merged[name] = torch.where(used, values, merged[name]) if name in merged else values
    return DraftDistribution(kind=kind, **merged)


def _widened_distribution(distribution: DraftDistribution, whole: Needs, width: int) -> dict[str, Tensor]:
    values = {name: value for name, value in vars(distribution).items() if isinstance(value, Tensor) and name != "kind"}
    widened: dict[str, Tensor] = {}
    for name, value in values.items():
        padding = PADDING_TOKEN_ID if name == "sparse_ids" else 0
        entries = whole.sparse_top_m if name.startswith("sparse") else value.shape[2]
        widened[name] = pad(value, (0, entries - value.shape[2], 0, width - value.shape[1]), value=padding)
    return widened
