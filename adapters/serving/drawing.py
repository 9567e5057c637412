"""Drafts that are drawn for an engine elsewhere: with its uniforms and sampling parameters, and told as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.core.host import CheckedDraft
from specdec.sdk.errors import RequestError
from specdec.sdk.needs import SamplingField
from specdec.sdk.types import DistributionKind, DraftDistribution, SamplingView, StepView
from specdec.sdk.wire import Ask, AskDrawn, AskStates, Distribution, Drawing

DTYPES = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}


@dataclass(frozen=True)
class ToldRandom:
    """The uniforms of the engine's own step."""

    uniforms: Tensor  # [num_uniforms, B] float64

    def uniform(self, draft_index: int) -> Tensor:
        """The numbers for the draft tokens at `draft_index`: [B] float64."""
        return self.uniforms[draft_index]


def drawings_of(ask: Ask, num_uniforms: int) -> Sequence[Drawing]:
    """What its rows are drawn with; nothing if they are not. Raises RequestError SD-E331 for too few numbers."""
    if not isinstance(ask, AskDrawn) or (isinstance(ask, AskStates) and not ask.drawings):
        return ()
    found = [len(each.uniforms) for each in ask.drawings]
    if found != [num_uniforms] * len(ask.rows):
        facts = {"expected": f"{num_uniforms} for each of {len(ask.rows)} rows", "found": str(found[:8])}
        raise RequestError("SD-E331", "a client sent other uniforms than drafts are drawn with", facts)
    return ask.drawings


def with_drawings(step: StepView, drawings: Sequence[Drawing], declared: Sequence[SamplingField]) -> StepView:
    """The step as its engine would show it. drawings: one for each of its requests."""
    device = step.budget.device
    uniforms = torch.tensor([each.uniforms for each in drawings], dtype=torch.float64, device=device)
    columns: dict[str, Any] = {
        name: torch.tensor([getattr(each, name) for each in drawings], dtype=DTYPES[name], device=device)
        for name in declared
    }
    all_greedy = not any(each.temperature for each in drawings)
    sampling = SamplingView(**columns, all_greedy=all_greedy) if declared else None
    return replace(step, random=ToldRandom(uniforms.T.contiguous()), sampling=sampling)


def distributions_of(draft: CheckedDraft) -> list[Distribution | None]:
    """What the drafts of each row were drawn from. None means that a row is one-hot, or empty."""
    held = draft.distribution
    if held is not None:  # a device is waited for by table, not by row
        tables: dict[str, Any] = {name: each.cpu() for name, each in vars(held).items() if isinstance(each, Tensor)}
        held = replace(held, **tables)
    found: list[Distribution | None] = []
    for row, report in enumerate(draft.reports):
        drawn = report is not None and report.length and report.kind != DistributionKind.ONE_HOT
        if report is not None and held is not None and drawn:
            found.append(_of_row(held, row, report.kind, report.length))
        else:
            found.append(None)
    return found


def _of_row(held: DraftDistribution, row: int, kind: int, length: int) -> Distribution:
    dense = held.probs if kind == DistributionKind.DENSE_PROBS else held.logits
    if dense is not None and kind != DistributionKind.SPARSE:
        return _as_message(kind, dense[row, :length])
    assert held.sparse_ids is not None, "the draft was checked"
    assert held.sparse_probs is not None, "the draft was checked"
    ids, probs = held.sparse_ids[row, :length], held.sparse_probs[row, :length]
    count = int((ids >= 0).any(dim=0).nonzero()[-1]) + 1  # behind what filters left, columns of padding are not sent
    return _as_message(kind, probs[:, :count], _bytes(ids[:, :count].to(torch.int32)))


def _as_message(kind: int, values: Tensor, ids: bytes = b"") -> Distribution:
    dtype: Any = str(values.dtype).removeprefix("torch.")
    of: Any = int(kind)
    return Distribution(of, dtype, _bytes(values), ids)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
