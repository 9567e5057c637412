"""The host's part of a step of the V2 runner: one read of the device, the proposer, and what the verifier takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..vllm_shared.distributions import dense_slots
from ..vllm_shared.driver import Driver
from ..vllm_shared.engine_step import EngineStep, UnreadDrafts
from .agreement import Agreement
from .step import StepReader

LEAST_TEMPERATURE = 1e-6
"""Of a greedy request, whose drafts are compared with the most likely token instead."""


class Drafting:
    """Drafts for one runner.

    Drafts that a device makes stay there where the scheduler asks for none of them. The host reads them with the next
    step's outcome, and does not wait until they are made.
    """

    def __init__(self, driver: Driver, reader: StepReader, agreement: Agreement, draft_logits: Tensor | None) -> None:
        """draft_logits: [rows, K, V], read by vLLM's verifier. None: every draft is one-hot."""
        self._driver, self._reader, self._agreement = driver, reader, agreement
        self._draft_logits = draft_logits
        self._unread: UnreadDrafts | None = None

    def drafts(
        self,
        batch: Any,
        num_sampled: Tensor,
        last_sampled: Tensor,
        temperature: Tensor,
        hidden: Sequence[Tensor],
        logits: Tensor | None,
        most: int,
    ) -> Tensor:
        """Slots [B, K] int64 on the device, in the order of vLLM's InputBatch, where each holds a token id.

        num_sampled: [B]. last_sampled: [rows, 1]. temperature: [rows]. hidden, logits: as `EngineStep` has them. most:
        drafts that vLLM verifies in the next step.
        """
        step, sampled, reports = self._reader.read(batch, num_sampled, hidden, logits, most, self._unread)
        self._driver.check(step)
        if self._unread is not None:
            self._driver.check_late(self._unread, reports)
        if self._driver.reads_late:
            return self._kept_on_device(step, sampled, batch.idx_mapping, last_sampled, temperature)
        drafts = self._agreement.on(self._driver.propose(step, sampled), most)
        slots, lengths = self._reader.keep(step, sampled, drafts)
        if self._draft_logits is not None:
            found = self._driver.distributions_of(step.request_ids, drafts)
            q = dense_slots(found, slots, self._reader.is_draft(lengths), self._draft_logits.shape[-1])
            put_logits(self._draft_logits, batch.idx_mapping, q, temperature[batch.idx_mapping])
            self._agreement.on_rows(self._draft_logits, batch.idx_mapping)
        return slots

    def _kept_on_device(
        self, step: EngineStep, sampled: Sequence[list[int]], rows: Tensor, last_sampled: Tensor, temperature: Tensor
    ) -> Tensor:
        unread = self._unread = self._driver.propose_unread(step, sampled)
        slots = self._reader.keep_unread(step, unread, last_sampled[rows])
        if self._draft_logits is not None:
            put_certain(self._draft_logits, rows, slots)  # vLLM verifies every slot, also of requests without drafts
            drafted = slots[unread.places]
            q = dense_slots(unread.distributions, drafted, unread.token_ids >= 0, self._draft_logits.shape[-1])
            put_logits(self._draft_logits, rows[unread.places], q, temperature[rows[unread.places]])
        return slots


def put_logits(logits: Tensor, rows: Tensor, q: Tensor, temperature: Tensor) -> None:
    """Write log q * temperature, in place: vLLM's verifier divides it by the temperature.

    logits: [rows, K, V]. rows, temperature: [B]. q: [B, K, V].
    """
    logits[rows] = q.log() * temperature.clamp(min=LEAST_TEMPERATURE)[:, None, None]


def put_certain(logits: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write, in place, that each slot is certain of its token. logits: [rows, K, V]. rows: [B]. slots: [B, K]."""
    logits.index_fill_(0, rows, -torch.inf)
    logits[rows[:, None], torch.arange(slots.shape[1], device=slots.device), slots] = 0.0
