"""Drives the core's plugin with another engine's steps: its requests, rows, drafts and distributions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from specdec.core.cache.block_pool import BlockPool
from specdec.core.cache.host_addressing import HostAddressing
from specdec.core.model.cpu_kernels import kernels_for
from specdec.core.proposing.draft_store import DraftStore
from specdec.core.proposing.services import LayerSource
from specdec.core.proposing.speculation import Speculation
from specdec.core.registry.hooks import Observers
from specdec.core.request.committed import Committed
from specdec.core.request.metrics import EngineMetrics
from specdec.core.request.request import Request
from specdec.core.runner.step import draft_budgets
from specdec.sdk.types import TargetInfo

from .distributions import dense_rows
from .engine_step import EngineStep
from .rows import RequestRows, as_request


class Driver:
    """Does for vLLM's steps what the core's runner does for its own: start, commit, propose, finish."""

    def __init__(
        self, info: TargetInfo, speculation: Speculation, observers: Observers, target: LayerSource, tokenizer: Any
    ) -> None:
        """Make the proposer and lend it the target. Raises what the proposer's constructor and `bind` raise.

        Blocks for draft KV are laid out at full length for every row: untouched pages of a CPU cost nothing.
        """
        self.metrics = EngineMetrics(info.model, speculation.loaded.plugin.label)
        self._info = info
        self._speculation = speculation
        self._keeps_kv = speculation.loaded.needs.draft_kv is not None
        self._keeps_distribution = (
            speculation.admission.keeps_distribution
        )  # without one, vLLM's own list of the drafts is all it takes
        per_row = -(-(info.max_model_len + speculation.lookahead) // info.block_size) if self._keeps_kv else 0
        num_blocks = info.max_num_seqs * per_row
        self._rows = RequestRows(info.max_num_seqs, BlockPool(num_blocks, info.block_size, per_row))
        self._drafts = DraftStore(speculation.distribution_buffers(info, target.device))
        kernels = kernels_for(target.device)
        addressing = HostAddressing(self._rows, kernels)
        services = speculation.services(info, target, tokenizer, num_blocks, addressing, kernels)
        self._host = speculation.host(info, services, self.metrics, observers, target.device)

    def begin_step(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """What ended or lost its KV since the last step, before anything of the new one is computed."""
        for request in self._rows.remove(sorted(finished)):  # a set, of which each worker has its own order
            self._end(request)
        for request_id in preempted:
            lost = self._rows.get(request_id)
            if lost is not None and lost.row >= 0:
                self._drafts.drop(lost.row)
                self._host.preempt(lost.view)
                self._rows.unseat(lost)

    def propose(self, step: EngineStep, sampled: Sequence[list[int]]) -> list[list[int]]:
        """Drafts in the order of the step: Python ints, at most K and no more than the request can use.

        sampled: output tokens of each request, [] in the middle of a prompt. Raises ProposerError only if
        `on_proposer_error` is "raise".
        """
        committed = self._commit(step, sampled)
        for each in committed:
            if each.request.finish_reason is not None:
                self._end(each.request)
        going_on = [each for each in committed if each.request.finish_reason is None]
        drafts = self._draft(step, going_on) if going_on and self._host.enabled else {}
        return [drafts.get(request_id, []) for request_id in step.request_ids]

    def distributions_of(self, request_ids: Sequence[str], token_ids: Sequence[list[int]]) -> Tensor | None:
        """q of the drafts that are verified now: [sum of lengths, V] float32; None if all of them are one-hot."""
        if not self._keeps_distribution:
            return None
        requests = [self._rows.get(request_id) for request_id in request_ids]
        rows = [request.row if request and ids else -1 for request, ids in zip(requests, token_ids, strict=True)]
        generations = [request.generation if request else -1 for request in requests]
        distributions = self._drafts.take(rows, generations, list(map(len, token_ids))).distributions()
        return None if distributions is None else dense_rows(distributions, token_ids, self._info.vocab_size)

    def close(self) -> None:
        """The worker shuts down."""
        self._host.close()

    def report(self) -> dict[str, Any]:
        """Of this worker: process id, proposer, calls of `propose`, errors by code, acceptance as the core counts."""
        return {
            "pid": os.getpid(),
            "proposer": self.metrics.proposer,
            "propose_calls": self.metrics.counts["proposer_propose_calls"],
            "errors": dict(self.metrics.proposer_errors),
            **self.metrics.acceptance.as_dict(),
        }

    def _end(self, request: Request) -> None:
        if request.row >= 0:
            self._drafts.drop(request.row)
        self._host.finish(request.view)
        self._rows.unseat(request)

    def _commit(self, step: EngineStep, sampled: Sequence[list[int]]) -> list[Committed]:
        """What the step did to each request that has not ended, those that end with it included."""
        committed: list[Committed] = []
        first_token = 0
        for request_id, start, output_ids in zip(step.request_ids, step.starts, sampled, strict=True):
            request = self._rows.get(request_id)
            if request is None or request.row < 0:
                request = self._placed(request, request_id, step)
            if request.finish_reason is None:
                committed.append(self._commit_one(request, step, start, first_token, output_ids))
            first_token += step.num_tokens[request_id]
        return committed

    def _placed(self, request: Request | None, request_id: str, step: EngineStep) -> Request:
        """The request, in a row and started. One that ended here gets no row again, should vLLM run it on."""
        if request is None:
            request = self._rows.add(as_request(request_id, step.states[request_id], self._info.max_model_len))
        if request.finish_reason is None:
            self._rows.seat(request)
        if not request.started:
            request.started = True
            self._host.start(request.view)
        return request

    def _commit_one(
        self, request: Request, step: EngineStep, start: int, first_token: int, output_ids: list[int]
    ) -> Committed:
        num_rows, drafts = step.num_tokens[request.request_id], step.drafts.get(request.request_id, [])
        if not output_ids:
            request.num_computed_tokens = start + num_rows - len(drafts)
            return Committed.now(request, first_token, num_rows, start, drafts, 0, [])
        num_accepted = len(output_ids) - 1
        count = request.commit(output_ids)
        request.num_computed_tokens = len(request.token_ids) - 1
        self.metrics.acceptance.record(len(drafts), num_accepted, count)
        return Committed.now(request, first_token, num_rows, start, drafts, num_accepted, output_ids[:count])

    def _draft(self, step: EngineStep, going_on: list[Committed]) -> dict[str, list[int]]:
        """Checked drafts by request id; their distributions are kept until they are verified."""
        if self._keeps_kv:
            for each in going_on:
                self._rows.pool.extend(each.request.blocks, each.length + self._speculation.lookahead)
        budgets = draft_budgets(going_on, self._host, min(self._host.num_draft_tokens, step.num_draft_tokens))
        checked = self._host.draft(self._host.views.build(going_on, budgets, step, step.hidden), budgets)
        if checked is None:
            return {}
        if self._keeps_distribution:
            all_greedy = all(
                each.request.params.greedy for each in going_on
            )  # their verification reads no distribution
            rows, generations = [each.row for each in going_on], [each.generation for each in going_on]
            self._drafts.put(rows, generations, checked, all_greedy=all_greedy)
        return {each.request.request_id: ids for each, ids in zip(going_on, checked.token_ids, strict=True)}
