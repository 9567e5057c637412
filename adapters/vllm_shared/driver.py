"""Drives the core's plugin with another engine's steps: its requests, rows, drafts and distributions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from specdec.core.host import (
    CheckedDraft,
    Committed,
    Computed,
    DraftReport,
    DraftStore,
    EngineMetrics,
    EngineServices,
    KVStorage,
    Provided,
    Request,
    RequestProgress,
    Scheduled,
    Speculation,
    TopTokens,
    profile_of,
    registry,
    rejection,
    upload,
    verified_step,
)
from specdec.sdk.errors import message
from specdec.sdk.extensions import DraftKV, Trees

from ..best_path import PathViews
from ..prometheus import prometheus_text
from .distributions import dense_rows
from .engine_step import EngineStep, UnreadDrafts
from .followed_grammars import FollowedGrammars
from .rows import RequestRows, as_request
from .shared_target import SharedTarget
from .supervised_host import Retries, SupervisedHost
from .watch import Watch

logger = logging.getLogger("specdec")


class Driver:
    """Does for vLLM's steps what the core's runner does for its own: start, commit, propose, finish."""

    def __init__(
        self,
        speculation: Speculation,
        observers: registry.Observers,
        target: SharedTarget,
        tokenizer: Any,
        rows: RequestRows,
        *,
        grammars: FollowedGrammars | None = None,
        read_late: bool = False,
        watch: Watch | None = None,
        retry_after_steps: int = 0,
    ) -> None:
        """Make the proposer and bind it to the target. Raises what the proposer's constructor and `bind` raise.

        grammars: None means that the proposer reads none. read_late: whether drafts may stay unread where they are made
        on a device; see `propose_unread`. watch: follows its calls. retry_after_steps: see `Retries`.
        """
        plugin, info = speculation.loaded.plugin, speculation.info
        self._watch = watch or Watch(plugin, math.inf)
        self.metrics = EngineMetrics(info.model, plugin.label)
        self._info = info
        self._speculation = speculation
        self._on_verified = observers.on_verified
        self._keeps_kv = speculation.loaded.needs.extension(DraftKV) is not None
        self._keeps_distribution = speculation.admission.keeps_distribution
        self._rows = rows
        needs = speculation.loaded.needs
        self._draws_trees = needs.extension(Trees) is not None
        views = PathViews(needs, speculation.loaded.config.width, info, target.device)
        self._num_top = views.num_top
        buffers = speculation.distribution_buffers(target.device)
        self._profile = profile_of(target.device)
        table = speculation.draft_table(target.device) if read_late and not self._draws_trees else None
        self.reads_late = table is not None
        self._drafts = DraftStore(buffers, table)
        self._table: Any = None  # of the draft KV, where a device addresses it
        self._grammars = grammars
        provided = Provided(grammar_of=None if grammars is None else grammars.of)
        self._services = EngineServices(info, needs, target, tokenizer, self._profile.backend, provided=provided)
        host = speculation.host(
            self._services,
            self.metrics,
            observers,
            target.device,
            views,
            read_late=self.reads_late,
            kind=partial(SupervisedHost, watch=self._watch),
        )
        assert isinstance(host, SupervisedHost), "by its kind"
        self._host = host
        self._retries = Retries(host, self.metrics, retry_after_steps)
        self._exit = ExitStack()
        self._progress = RequestProgress(self._drafts, self._host, self.metrics, self._rows.unseat)

    def lay_out(self, storage: KVStorage | None = None) -> None:
        """Draft KV gets its place on the blocks of the rows, and the proposer warms up there.

        storage: keys and values of each draft layer in vLLM's pages. None: in memory of our own.
        """
        addressing = self._profile.addressing(self._rows, self._info, self._speculation.lookahead)
        self._services.lay_out_draft_kv(self._rows.pool.num_blocks, addressing, storage)
        self._table = addressing.table
        self._host.warm_up()

    def begin_step(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Handle what ended or lost its KV since the last step, before anything of the new step is computed."""
        self._host.ask_metrics()
        self.finish(finished)
        requests = [self._rows.requests.get(request_id) for request_id in preempted]
        lost = [request for request in requests if request is not None and request.row >= 0]
        for request in lost:
            self._rows.unseat(request)
        self._progress.preempt(lost)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests: they ended, or go on as others."""
        self._progress.finish(self._rows.remove(request_ids))

    def resume(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A preempted request comes back with the tokens that vLLM's scheduler knew when it planned the preemption.

        With asynchronous scheduling it gives up those of the step that was under way, and samples them again.
        """
        request = self._rows.requests.get(request_id)
        if request is not None and request.row < 0 and request.finish_reason is None:
            request.token_ids[:] = token_ids
            if self._grammars is not None:
                self._grammars.restart(request)

    def check(self, step: EngineStep) -> None:
        """Stop drafting if vLLM computed other positions than those that follow: its bookkeeping is not as known."""
        for request_id, start in zip(step.request_ids, step.starts, strict=True):
            request = self._rows.requests.get(request_id)
            if self._host.enabled and request and request.row >= 0 and request.num_computed_tokens != start:
                self._host.enabled = False
                self._retries.stop()
                facts = {"request": request_id, "expected": f"position {request.num_computed_tokens}"}
                facts |= {"found": f"position {start}", "effect": "vLLM goes on without drafts"}
                logger.warning("%s", message("SD-W239", "vLLM computed other positions than it said", facts))

    def propose(self, step: EngineStep, sampled: Sequence[list[int]]) -> list[list[int]]:
        """Drafts in the order of the step: Python ints, at most K and no more than the request can use.

        sampled: output tokens of each request, [] in the middle of a prompt. Raises ProposerError only if
        `on_proposer_error` is "raise".
        """
        going_on, checked = self._drafted(step, sampled)
        drafts = checked.token_ids if checked else []
        cut = [ids[: step.num_draft_tokens] for ids in drafts]
        by_id = dict(zip([each.request.request_id for each in going_on], cut, strict=False))
        return [by_id.get(request_id, []) for request_id in step.request_ids]

    def propose_unread(self, step: EngineStep, sampled: Sequence[list[int]]) -> UnreadDrafts:
        """Propose drafts that stay on the device (`reads_late`). `check_late` follows when they were read."""
        going_on, checked = self._drafted(step, sampled)
        requests = [each.request for each in going_on] if checked else []
        taken = self._drafts.take([(each.row, each.generation, step.num_draft_tokens) for each in requests])
        request_ids = [each.request_id for each in requests]
        places = [step.request_ids.index(request_id) for request_id in request_ids]
        assert taken.table is not None, "drafts are read late"
        rows, limits, at = upload([taken.rows, taken.lengths, places], taken.table.device)
        numbers, token_ids = taken.table.gather(rows, limits, self._host.width)
        distributions = taken.distributions([rows, taken.table.kinds(numbers)])
        return UnreadDrafts(request_ids, at, token_ids, numbers, distributions, taken)

    @torch.inference_mode()
    def idle(self) -> None:
        """vLLM keeps its ranks in step, or warms up: a dummy step without requests. Raises as `propose` does."""
        self._host.draft(replace(self._host.views.idle(), dummy=True), [])

    def check_late(self, unread: UnreadDrafts, reports: Sequence[DraftReport]) -> None:
        """Hold drafts of an earlier step to the contract. Raises ProposerError only if that was asked for."""
        self._progress.check_late(unread.request_ids, unread.taken, reports)

    def _drafted(self, step: EngineStep, sampled: Sequence[list[int]]) -> tuple[list[Committed], CheckedDraft | None]:
        """Commit the step, and draft for the requests that go on. None means that there are no drafts."""
        self._retries.begin_step()
        committed = self._commit(step, sampled)
        if step.logits is not None and self._on_verified.get_hookimpls():
            places = dict(zip(step.request_ids, step.first_rows, strict=True))
            first_rows = [places[each.request.request_id] for each in committed]
            self._on_verified(step=verified_step(committed, first_rows, step.logits))
        self._progress.finish([each.request for each in committed if each.request.finish_reason is not None])
        going_on = [each for each in committed if each.request.finish_reason is None]
        if self._keeps_kv and self._host.enabled:
            self._hold_blocks(going_on)
        most = self._host.width  # nodes, of which a path is verified
        if not self._draws_trees:
            most = min(most, step.num_draft_tokens)
        top = self._top(step, sampled) if self._num_top else None
        computed = Computed(step.token_ids, step.positions, step.hidden, top)
        return going_on, self._progress.propose(going_on, most, computed)

    def _top(self, step: EngineStep, sampled: Sequence[list[int]]) -> TopTokens:
        """The likeliest tokens after each token whose logits chose something. vLLM computes logits in the middle of a
        prompt, too.
        """
        assert step.logits is not None, "the proposer's needs ask for them"
        stops = accumulate(step.num_tokens[request_id] for request_id in step.request_ids)
        first_rows = pairwise([*step.first_rows, len(step.logits)])
        pairs = [
            (row, stop - last + row)
            for (first, last), stop, output_ids in zip(first_rows, stops, sampled, strict=True)
            for row in range(first, last)
            if output_ids
        ]
        rows, places = upload([[row for row, _ in pairs], [place for _, place in pairs]], step.logits.device)
        return TopTokens.of(step.logits[rows], places, step.num_computed, self._num_top)

    def dense_rows_of(self, request_ids: Sequence[str], token_ids: Sequence[list[int]]) -> Tensor | None:
        """q of the drafts that are verified now: [sum of lengths, V] float32; None if all of them are one-hot."""
        distributions = self.distributions_of(request_ids, token_ids)
        return None if distributions is None else dense_rows(distributions, token_ids, self._info.vocab_size)

    def distributions_of(
        self, request_ids: Sequence[str], token_ids: Sequence[list[int]]
    ) -> rejection.DraftDistributions | None:
        """The distributions of each request's drafts that are verified now. None means that all of them are one-hot."""
        if not self._keeps_distribution:
            return None
        requests = [self._rows.requests.get(request_id) for request_id in request_ids]
        wanted = [
            (request.row, request.generation, len(ids)) if request and ids else (-1, -1, 0)
            for request, ids in zip(requests, token_ids, strict=True)
        ]
        return self._drafts.take(wanted).distributions()

    @property
    def proposer(self) -> Any:
        """The object that drafts."""
        return self._host.proposer

    def close(self) -> None:
        """The worker shuts down."""
        with self._exit:
            self._exit.callback(self._watch.stop)  # before what `at_close` was given, which the watch may write again
            self._host.close()

    def at_close(self, call: Callable[[], None]) -> None:
        """Call this when the worker shuts down."""
        self._exit.callback(call)

    def published(self) -> str:
        """Prometheus's text: what is counted, whether the proposer is asked, how long a call has been running.

        And the proposer's own figures, as it told them last: this is the thread of a reader.
        """
        self._host.metrics_wanted = True
        now = {"proposer_enabled": float(self._host.enabled), "proposer_call_seconds": self._watch.seconds}
        return prometheus_text(self.metrics.collect(of_proposer=now | self._host.own_metrics))

    def _commit(self, step: EngineStep, sampled: Sequence[list[int]]) -> list[Committed]:
        """What the step did to each request that has not ended, those that end with it included."""
        shares = [
            self._share(step, *place) for place in zip(step.request_ids, step.starts, map(bool, sampled), strict=True)
        ]
        self._progress.start([share.request for share in shares])
        committed: list[Committed] = []
        first_token = 0
        for share, output_ids in zip(shares, sampled, strict=True):
            if share.request.finish_reason is None:
                drafts, placed = step.drafts.get(share.request.request_id, []), share._replace(first_token=first_token)
                committed.append(self._progress.commit(placed, drafts, output_ids))
            first_token += share.num_rows
        return committed

    def _hold_blocks(self, committed: Sequence[Committed]) -> None:
        """Draft passes write past the newest token."""
        for each in committed:
            self._rows.hold(each.request, each.length + self._speculation.lookahead)
        if self._table is not None:
            self._table.update((each.row, each.generation, each.request.blocks) for each in committed)

    def _as_request(self, request_id: str, step: EngineStep) -> Request:
        state = step.states[request_id]
        request = as_request(request_id, state, self._info.max_model_len, self._speculation.loaded)
        if self._grammars is not None:
            self._grammars.start(request, state.sampling_params.structured_outputs)
        return request

    def _share(self, step: EngineStep, request_id: str, start: int, samples: bool) -> Scheduled:
        """What vLLM computed of a request, in a row. One that ended here gets none again, should vLLM run it on."""
        request = self._rows.requests.get(request_id)
        if request is None:
            request = self._rows.requests[request_id] = self._as_request(request_id, step)
        if request.row < 0 and request.finish_reason is None:
            self._rows.seat(request)
        num_drafts = len(step.drafts.get(request_id, []))
        return Scheduled(request, start, step.num_tokens[request_id] - num_drafts, num_drafts, samples)
