"""The step: schedule, forward, verify, commit, propose. It is the same for prefill, decoding and speculation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.hooks import StepStats, VerifiedRequest, VerifiedStep

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..model.target import Target, TargetOutput
from ..proposing.draft_store import DraftStore
from ..proposing.draft_table import DraftReport
from ..proposing.proposer_host import ProposerHost
from ..proposing.top_tokens import TopTokens
from ..proposing.views import Computed
from ..rejection import STATUS_BAD_ROW, Verdict, VerificationRule, verify
from ..request.metrics import EngineMetrics
from ..request.request import Committed, Request
from ..request.verified_tree import VerifiedTree
from .batch import Batch, SamplingTable, accepted_paths, build_batch
from .request_progress import RequestProgress, uninterrupted
from .sampling import adjust_logits, likely, mask_logits, on_its_way, read_likely
from .scheduler import Scheduling

UNTIMED = nullcontext()


class Runner:
    """Owns the order of a step, and nothing that outlives it except through the objects it is given."""

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        scheduler: Scheduling,
        drafts: DraftStore,
        metrics: EngineMetrics,
        host: ProposerHost | None,
        addressing: Addressing,
        rule: VerificationRule = verify,
        *,
        on_verified: Any = None,
    ) -> None:
        """`addressing`: of the cache. `rule`: how drafts are verified. `on_verified`: the hook that is told of what was
        verified. None means that nobody is.
        """
        self._target = target
        self._addressing = addressing
        self._cache = cache
        self._scheduler = scheduler
        self._drafts = drafts
        self._metrics = metrics
        self._host = host
        self._rule = rule
        self._num_top = host.views.num_top if host else 0  # of the target's most likely tokens
        self.progress = RequestProgress(drafts, host, metrics, scheduler.finish, may_pad=addressing.num_pad_blocks > 0)
        self._sampling = SamplingTable()
        self._num_steps = 0
        self._on_verified = on_verified
        self.last_stats: StepStats | None = None  # of the last step that committed anything

    def step(self, committed: list[Committed]) -> None:
        """Advance every scheduled request.

        `committed` is filled with what was committed to each, ended ones included: it is the caller's, so that nothing
        is lost if the step is interrupted. A proposer's error is raised when all is done.
        """
        start = time.perf_counter()
        with self._host.raising_last() if self._host else UNTIMED:
            try:
                self._advance(committed)
            finally:
                if committed and self._host and self.last_stats:
                    self._host.keep_pace(self.last_stats, time.perf_counter() - start)

    def _advance(self, committed: list[Committed]) -> None:
        with self._timed("schedule"):
            with uninterrupted():  # queues, rows and blocks belong together
                plan = self._scheduler.schedule(lambda request: self._drafts.length(request.row, request.generation))
            self.progress.preempt(plan.preempted)
            if not plan.shares:  # an interrupted step took the state of all of them
                return
            self._num_steps += 1
            self._metrics.counts["num_steps"] += 1
            self.progress.start([share.request for share in plan.shares])
            batch = build_batch(plan.shares, self._drafts, self._cache, self._addressing, self._sampling)
        with self._timed("forward"):
            output = self._target.forward(batch.inputs)
        with self._timed("verify"), torch.inference_mode():  # bias and penalties change the logits in place
            inputs, top = batch.inputs, None
            if self._num_top:
                top = TopTokens.of(output.logits, inputs.logits_rows, len(inputs.token_ids), self._num_top)
            verdict, logprobs = self._verify(batch, output)
        with self._timed("commit"):
            if batch.trees is not None and verdict.path is not None:
                batch.trees.move_paths(verdict.path)
            outcome, reports, paths = self._read(batch, verdict)
            self._commit(batch, batch.taken.verified(reports), outcome, logprobs, committed, paths)
        if self._on_verified is not None and self._on_verified.get_hookimpls():
            first_rows = accumulate((share.num_logits_rows for share in batch.shares), initial=0)
            self._on_verified(step=verified_step(committed, first_rows, output.logits))
        with self._timed("propose"):
            if self._host:
                going_on = [each for each in committed if each.request.finish_reason is None]
                computed = Computed(inputs.token_ids, inputs.positions, output.hidden, top)
                self.progress.propose(going_on, self._host.width, computed)
            if batch.numbers.shape[1]:
                names = [share.request.request_id for share in batch.shares]
                self.progress.check_late(names, batch.taken, reports)

    def _verify(self, batch: Batch, output: TargetOutput) -> tuple[Verdict, dict[str, Tensor]]:
        requests = [share.request for share in batch.shares]
        logprobs: dict[str, Tensor] = {}
        if [request for request in requests if request.reads_logits]:
            bounds = list(accumulate((share.num_logits_rows for share in batch.shares), initial=0))
            mask_logits(output.logits, requests, bounds, batch.drafted)
            for request, first, stop in zip(requests, bounds, bounds[1:], strict=False):
                if request.params.logprobs is not None:
                    logprobs[request.request_id] = output.logits[first:stop].float().log_softmax(dim=-1)
            adjust_logits(output.logits, requests, bounds, batch.drafts.token_ids, batch.drafts.parents)
        verdict = self._rule(output.logits, batch.cu_rows, batch.drafts, batch.sampling)
        for b, request in enumerate(requests if logprobs else ()):
            if request.params.logprobs is not None:
                rows = logprobs[request.request_id]
                if verdict.path is not None:  # of the places in a tree, those on the path
                    rows = rows[verdict.path[b, : len(rows)].clamp(min=0)]
                logprobs[request.request_id] = likely(rows, verdict.output_ids[b], request.params.logprobs)
        return verdict, on_its_way(logprobs) if logprobs else {}

    @staticmethod
    def _read(
        batch: Batch, verdict: Verdict
    ) -> tuple[Sequence[list[int]], list[DraftReport], list[VerifiedTree] | None]:
        """What became of each request, its draft as it was, and the path in a tree: here the host waits."""
        width = 2 + verdict.output_ids.shape[1]
        if verdict.on_host is not None and not batch.numbers.shape[1] and verdict.path is None:
            return verdict.on_host, batch.taken.reports(verdict.on_host, width), None
        columns = [verdict.num_accepted[:, None], verdict.status[:, None], verdict.output_ids, batch.numbers]
        columns += [] if verdict.path is None else [verdict.path]
        outcome: list[list[int]] = torch.cat(columns, dim=1).tolist()
        depth = 0 if verdict.path is None else verdict.path.shape[1]
        paths = accepted_paths(batch, [row[-depth:] for row in outcome]) if depth else None
        return outcome, batch.taken.reports(outcome, width), paths

    def _commit(
        self,
        batch: Batch,
        drafted: Sequence[list[int]],
        outcome: Sequence[list[int]],
        logprobs: dict[str, Tensor],
        committed: list[Committed],
        paths: Sequence[VerifiedTree] | None,
    ) -> None:
        kept = read_likely(logprobs) if logprobs else {}
        nodes, num_bad = paths or repeat(None), 0
        with uninterrupted():  # tokens, texts and counters of a step belong together
            for share, drafts, (accepted, status, *ids), path in zip(
                batch.shares, drafted, outcome, nodes, strict=False
            ):
                output_ids = ids[: accepted + 1] if share.samples else []
                num_bad += bool(status & STATUS_BAD_ROW)
                each = self.progress.commit(share, drafts, output_ids, path)
                if each.request.request_id in kept:
                    each.request.logprobs += kept[each.request.request_id][: len(each.token_ids)]
                committed.append(each)
            self._metrics.counts["bad_logits_rows"] += num_bad
            self._count(committed)
        ended = [each.request for each in committed if each.request.finish_reason is not None]
        if ended:
            self.progress.finish(ended)

    def finish(self, requests: Sequence[Request]) -> None:
        """Release everything that ended requests hold, here and in the proposer, whose error is raised last."""
        with self._host.raising_last() if self._host else UNTIMED:
            self.progress.finish(requests)

    def _count(self, committed: Sequence[Committed]) -> None:
        drafted = [each for each in committed if each.draft_token_ids]
        self.last_stats = StepStats(
            step=self._num_steps,
            num_requests=len(committed),
            num_tokens_computed=sum(map(attrgetter("num_rows"), committed)),
            num_drafts=len(drafted),
            num_draft_tokens=sum(map(attrgetter("num_drafted"), drafted)),
            num_accepted_tokens=sum(map(attrgetter("num_accepted"), drafted)),
            num_committed_tokens=sum([len(each.token_ids) for each in committed]),
        )

    def _timed(self, stage: str) -> AbstractContextManager[object]:
        return self._metrics.timed(stage) if self._metrics.is_profiled else UNTIMED


def verified_step(committed: Sequence[Committed], first_rows: Iterable[int], logits: Tensor) -> VerifiedStep:
    """What listeners are shown of a step: its requests that sampled. first_rows: of each request in `logits` [R, V]."""
    shown = [
        VerifiedRequest(
            request_id=each.request.request_id,
            first_row=first_row,
            position=each.length - len(each.token_ids),
            draft_token_ids=each.draft_token_ids,
            num_accepted=each.num_accepted,
            token_ids=each.token_ids,
            accepted_nodes=None if each.tree is None else each.tree.nodes,
        )
        for each, first_row in zip(committed, first_rows, strict=False)
        if each.token_ids
    ]
    return VerifiedStep(requests=tuple(shown), logits=logits)
