"""What a proposer is shown of a step, built from what the step committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from specdec.sdk import KeptRows, Needs, Phase, SamplingView, StepView

from ..kernels.philox import Stream, uniform
from ..request import Request
from .batch import Batch, BatchItem


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
        self, committed: Sequence[Committed], budgets: Sequence[int], batch: Batch, hidden: Tensor | None
    ) -> StepView:
        """The view of the requests that go on; `hidden` [N, L*H] of the whole batch."""
        requests = [each.request for each in committed]
        columns = [
            [request.row for request in requests],
            [request.generation for request in requests],
            [each.phase for each in committed],
            [len(request.token_ids) for request in requests],
            [each.request.token_ids[self._newest(each)] for each in committed],
            [len(each.item.draft_token_ids) for each in committed],
            [each.num_accepted for each in committed],
            list(budgets),
            [request.draft_key for request in requests],
        ]
        facts = torch.tensor(columns, dtype=torch.int64, device=self.device)
        rows, generation, phase, length, newest, num_drafted, num_accepted, budget, keys = facts.unbind()
        for request in requests:
            self._record(request)
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
            kept=self._kept_rows(committed, batch, hidden),
            random=StepRandom(keys, length),
            sampling=self._sampling(requests),
            history=self._history,
        )

    @staticmethod
    def _newest(each: Committed) -> int:
        return -1 if each.token_ids else each.request.num_computed_tokens

    def _record(self, request: Request) -> None:
        if self._history is None:
            return
        generation, recorded = self._recorded.get(request.row, (-1, 0))
        start = recorded if generation == request.generation else 0
        new = torch.tensor(request.token_ids[start:], dtype=torch.int64)
        self._history[request.row, start : start + len(new)] = new.to(self.device)
        self._recorded[request.row] = (request.generation, len(request.token_ids))

    def _kept_rows(self, committed: Sequence[Committed], batch: Batch, hidden: Tensor | None) -> KeptRows:
        """Host form: kept rows only. Device form: every computed row of the requests that go on."""
        compact = self.needs.placement == "host"
        index: list[int] = []
        bounds = [0]
        next_ids: list[int] = []
        for each in committed:
            first, kept, position = each.item.first_token, each.num_kept, each.first_position
            shown = kept if compact else each.item.num_rows
            index += range(first, first + shown)
            bounds.append(len(index))
            next_ids += each.request.token_ids[position + 1 : position + kept + 1] + [-1] * (shown - kept)
        token_ids, positions = batch.token_ids, batch.positions
        if index != list(range(len(token_ids))):
            chosen = torch.tensor(index, dtype=torch.int64).to(token_ids.device, non_blocking=True)
            token_ids, positions = token_ids[chosen], positions[chosen]
            hidden = None if hidden is None else hidden[chosen]
        return KeptRows(
            cu_rows=self._ints(bounds),
            num_kept=self._ints([each.num_kept for each in committed]),
            kept_start=self._ints([each.first_position for each in committed]),
            positions=positions.to(self.device),
            token_ids=token_ids.to(self.device),
            next_token_ids=self._ints(next_ids),
            hidden=None if hidden is None else hidden.to(self.device),
        )

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _sampling(self, requests: Sequence[Request]) -> SamplingView | None:
        if not self.needs.sampling:
            return None
        columns = {
            name: torch.tensor(
                [attrgetter(name)(request.params) for request in requests],
                dtype=torch.int64 if name == "top_k" else torch.float32,
                device=self.device,
            )
            for name in self.needs.sampling
        }
        return SamplingView(**columns, all_greedy=all(request.params.greedy for request in requests))
