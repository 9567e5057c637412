"""A step of the V2 runner on the host: what was sampled and verified, and the drafts for the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core.host import DraftReport, upload

from ..vllm_shared.engine_step import EngineStep, UnreadDrafts
from .requests import Requests


class StepReader:
    """Reads the device once a step. Asynchronous scheduling allows it: no draft has to reach the scheduler."""

    def __init__(self, num_slots: int, states: Any, requests: Requests) -> None:
        """num_slots: draft tokens of a request that vLLM has room for. states: the runner's RequestState."""
        self._num_slots = num_slots
        self._states = states
        self._requests = requests
        self._places = torch.arange(num_slots + 1, device=states.device)

    def read(
        self,
        batch: Any,
        num_sampled: Tensor,
        hidden: Sequence[Tensor],
        logits: Tensor | None,
        most: int,
        unread: UnreadDrafts | None = None,
    ) -> tuple[EngineStep, list[list[int]], list[DraftReport]]:
        """The step, each request's output tokens ([] in the middle of a prompt), and what `unread` was.

        batch: vLLM's InputBatch. num_sampled: [B]. hidden, logits: as `EngineStep` has them. most: drafts that vLLM
        verifies in the next step. unread: those of the step before; None: they were read.
        """
        facts, numbers = self._facts(batch, num_sampled, unread)
        reports = [] if unread is None else self._note(unread, numbers)
        sampled = [tokens[:count] for count, _, *tokens in facts]
        scheduled = batch.num_draft_tokens_per_req
        counts = [0] * batch.num_reqs if scheduled is None else scheduled.tolist()
        drafts = {
            request_id: self._verified(request_id, count, output_ids)
            for request_id, count, output_ids in zip(batch.req_ids, counts, sampled, strict=True)
        }
        step = EngineStep(
            request_ids=tuple(batch.req_ids),
            states=self._requests,
            starts=[start for _, start, *_ in facts],
            num_tokens=dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist(), strict=True)),
            drafts=drafts,
            input_ids=batch.input_ids,
            input_positions=batch.positions,
            hidden=hidden,
            num_draft_tokens=most,
            logits=logits,
            first_rows=() if logits is None else batch.cu_num_logits_np[:-1].tolist(),
        )
        return step, sampled, reports

    def keep(
        self, step: EngineStep, sampled: Sequence[list[int]], drafts: Sequence[list[int]]
    ) -> tuple[Tensor, Tensor]:
        """Note what the next step verifies. Returns, on the device, slots [B, K] int64 and each draft's length [B].

        Slots are filled up with a token that can be embedded.
        """
        slots: list[int] = []
        for request_id, output_ids, draft in zip(step.request_ids, sampled, drafts, strict=True):
            self._requests[request_id].drafts[:] = draft
            padding = output_ids[-1] if output_ids else 0
            slots += [*draft, *[padding] * (self._num_slots - len(draft))]
        sent, lengths = upload([slots, list(map(len, drafts))], self._states.device)
        return sent.view(len(drafts), -1), lengths

    def keep_unread(self, step: EngineStep, unread: UnreadDrafts, newest: Tensor) -> Tensor:
        """Keep drafts that the next read will show: only slots [B, K] are filled. newest: [B, 1] token ids."""
        for request_id in step.request_ids:
            self._requests[request_id].drafts.clear()
        slots = newest.long().clamp(min=0).repeat(1, self._num_slots)
        drafted = unread.token_ids.where(unread.token_ids >= 0, slots[unread.places])
        return slots.index_copy_(0, unread.places, drafted)

    def is_draft(self, lengths: Tensor) -> Tensor:
        """[B, K] bool for lengths [B]."""
        return self._places[:-1] < lengths[:, None]

    def _note(self, unread: UnreadDrafts, numbers: Sequence[Sequence[int]]) -> list[DraftReport]:
        """Note the tokens that vLLM was given."""
        reports = unread.taken.reports(numbers)
        for request_id, ids in zip(unread.request_ids, unread.taken.verified(reports), strict=True):
            if request_id in self._requests:
                self._requests[request_id].drafts[:] = ids
        return reports

    def _facts(
        self, batch: Any, num_sampled: Tensor, unread: UnreadDrafts | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Each request's sampled tokens, first computed position and newest tokens, and the numbers of `unread`.

        The host waits here.
        """
        rows = batch.idx_mapping
        counts = num_sampled[:, None].long()
        places = self._states.total_len.gpu[rows][:, None] - counts + self._places
        places.clamp_(max=self._states.max_model_len - 1)
        tokens = self._states.all_token_ids.gpu[rows[:, None], places]
        starts = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
        facts = torch.cat([counts, starts[:, None], tokens], dim=1)
        read = (facts if unread is None else torch.cat([facts, unread.numbers])).tolist()
        return read[: len(facts)], read[len(facts) :]

    def _verified(self, request_id: str, scheduled: int, output_ids: list[int]) -> list[int]:
        """The drafts that the step verified.

        Asynchronous scheduling verifies every slot. A filled slot that was right by chance is an accepted token.
        """
        drafts = self._requests[request_id].drafts[:scheduled]
        return output_ids[:-1] if len(output_ids) > len(drafts) + 1 else drafts
