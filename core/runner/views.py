"""What a proposer is shown of a step, built from what the step committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.sdk import KeptRows, Needs, Phase, SamplingView, StepView

from ..kernels.philox import Stream, uniform
from ..request import Request
from .batch import BatchItem
from .transfer import upload


class Computed(Protocol):
    """The tokens of one forward pass."""

    @property
    def token_ids(self) -> Tensor: ...  # [N] int64
    @property
    def positions(self) -> Tensor: ...  # [N] int64


@dataclass(frozen=True)
class Committed:
    """What a step did to one request."""

    item: BatchItem
    token_ids: list[int]  # committed; empty in the middle of a prompt
    num_accepted: int

    @property
    def request(self) -> Request:
        return self.item.scheduled.request

    @property
    def num_kept(self) -> int:
        """Rows whose KV survived: everything computed up to, not including, the newest token."""
        return self.request.num_computed_tokens - self.first_position

    @property
    def first_position(self) -> int:
        return self.item.scheduled.start

    @property
    def phase(self) -> Phase:
        if not self.token_ids:
            return Phase.PREFILL
        return Phase.PREFILL_DONE if self.request.num_output_tokens == len(self.token_ids) else Phase.DECODE


@dataclass(frozen=True)
class StepRandom:
    """The draft stream of a step's requests: keys derived from their seeds, positions of their next tokens."""

    keys: Tensor  # [B] int64
    positions: Tensor  # [B] int64

    def uniform(self, draft_index: int) -> Tensor:
        """One number in (0, 1) per request for the draft token at `draft_index`: [B] float64."""
        return uniform(self.keys, self.positions, Stream.DRAFT, draft_index)


def _facts(each: Committed, budget: int) -> tuple[int, ...]:
    """One request's row of the view: row, generation, phase, length, newest token, drafted, accepted, budget, key."""
    request = each.request
    return (
        request.row,
        request.generation,
        each.phase,
        len(request.token_ids),
        request.token_ids[-1 if each.token_ids else request.num_computed_tokens],
        len(each.item.draft_token_ids),
        each.num_accepted,
        budget,
        request.draft_key,
    )


class KeptColumns(NamedTuple):
    """What the host says of the rows that a view shows."""

    lists: list[list[int]]  # bounds, counts, starts, next tokens; then tokens and positions, or in device form `rows`
    rows: list[int]  # [N] among the batch's; empty: all of them
    compact: bool  # host form


class ViewBuilder:
    """Builds the view that one proposer declared to need, and keeps the token history if it reads that."""

    def __init__(
        self,
        needs: Needs,
        num_draft_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.needs = needs
        self.num_draft_tokens = num_draft_tokens
        self.device = device if needs.placement == "device" else torch.device("cpu")
        shape = (max_num_seqs, max_model_len)
        self._history = torch.zeros(shape, dtype=torch.int64, device=self.device) if needs.history else None
        self._recorded: dict[int, tuple[int, int]] = {}  # row -> generation, tokens in the history

    def build(
        self,
        committed: Sequence[Committed],
        budgets: Sequence[int],
        batch: Computed,
        hidden: Tensor | None,
        *,
        may_pad: bool = False,
    ) -> StepView:
        """The view of the requests that go on, at least one; `hidden` [N, L*H] of the whole batch.

        `may_pad`: whether a draft pass may write past a request's blocks, where nobody reads it.
        """
        requests = [each.request for each in committed]
        of_each = [_facts(each, budget) for each, budget in zip(committed, budgets, strict=True)]
        kept = self._kept_columns(committed, batch, shows_hidden=hidden is not None)
        most_rows = max(each.item.num_rows for each in committed) if may_pad and not kept.compact else None
        facts = upload([*self._news(requests), *zip(*of_each, strict=True), *kept.lists], self.device)
        places, news, rows, generation, phase, length, newest, num_drafted, num_accepted, budget, keys, *shown = facts
        if self._history is not None:
            self._history.view(-1).index_copy_(0, places, news)
        return StepView(
            request_ids=tuple(request.request_id for request in requests),
            num_draft_tokens=self.num_draft_tokens,
            rows=rows,
            generation=generation,
            phase=phase,
            committed_length=length,
            newest_token=newest,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            budget=budget,
            kept=self._kept_rows(kept, shown, batch, hidden, most_rows),
            random=StepRandom(keys, length),
            sampling=self._sampling(requests),
            history=self._history,
        )

    def _news(self, requests: Sequence[Request]) -> tuple[list[int], list[int]]:
        """Places in the flat history where tokens are missing, and the tokens. They count as written from now on."""
        places: list[int] = []
        news: list[int] = []
        if self._history is None:
            return places, news
        width = self._history.shape[1]
        for request in requests:
            start, length, first = self._num_recorded(request), len(request.token_ids), request.row * width
            places += range(first + start, first + length)
            news += request.token_ids[start:]
            self._recorded[request.row] = (request.generation, length)
        return places, news

    def _num_recorded(self, request: Request) -> int:
        generation, recorded = self._recorded.get(request.row, (-1, 0))
        return recorded if generation == request.generation else 0

    def _kept_columns(self, committed: Sequence[Committed], batch: Computed, *, shows_hidden: bool) -> KeptColumns:
        """Host form: kept rows only, whose tokens the host knows. Device form: every computed row that goes on."""
        compact = self.needs.placement == "host"
        places: list[int] = []  # of the rows shown, among the batch's
        bounds = [0]
        counts: list[int] = []
        starts: list[int] = []
        next_ids: list[int] = []
        kept_ids: list[int] = []
        kept_positions: list[int] = []
        for each in committed:
            token_ids, start, kept = each.request.token_ids, each.first_position, each.num_kept
            shown = kept if compact else each.item.num_rows
            bounds.append(bounds[-1] + shown)
            counts.append(kept)
            starts.append(start)
            next_ids += token_ids[start + 1 : start + kept + 1]
            if compact:
                kept_ids += token_ids[start : start + kept]
                kept_positions += range(start, start + kept)
            else:
                next_ids += [-1] * (shown - kept)
            if shows_hidden or not compact:
                places += range(each.item.first_token, each.item.first_token + shown)
        rows = [] if not places or places == list(range(len(batch.positions))) else places
        lists = [bounds, counts, starts, next_ids]
        return KeptColumns([*lists, kept_ids, kept_positions] if compact else [*lists, rows], rows, compact)

    @staticmethod
    def _kept_rows(
        kept: KeptColumns, sent: Sequence[Tensor], batch: Computed, hidden: Tensor | None, most_rows: int | None
    ) -> KeptRows:
        """`sent`: the columns' lists, where the view is shown."""
        cu_rows, num_kept, kept_start, next_token_ids, *rest = sent
        if kept.compact:
            token_ids, positions = rest
            if hidden is not None and kept.rows:
                hidden = hidden[upload([kept.rows], hidden.device)[0]]
        else:
            token_ids, positions = batch.token_ids, batch.positions
            if kept.rows:
                token_ids, positions = token_ids[rest[0]], positions[rest[0]]
                hidden = None if hidden is None else hidden[rest[0]]
        return KeptRows(
            cu_rows=cu_rows,
            num_kept=num_kept,
            kept_start=kept_start,
            positions=positions,
            token_ids=token_ids,
            next_token_ids=next_token_ids,
            hidden=None if hidden is None else hidden.to(cu_rows.device),
            most_rows=most_rows,
        )

    def _sampling(self, requests: Sequence[Request]) -> SamplingView | None:
        if not self.needs.sampling:
            return None
        columns = {
            name: upload(
                [[attrgetter(name)(request.params) for request in requests]],
                self.device,
                torch.int64 if name == "top_k" else torch.float32,
            )[0]
            for name in self.needs.sampling
        }
        return SamplingView(**columns, all_greedy=all(request.params.greedy for request in requests))
