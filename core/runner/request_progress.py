"""What a step does to its requests, in every engine: start, preempt, commit, finish, propose."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from specdec.sdk.types import RequestView

from ..proposing.draft_store import DraftStore, TakenDrafts
from ..proposing.draft_table import CheckedDraft, DraftReport
from ..proposing.proposer_host import ProposerHost
from ..proposing.views import Computed
from ..request.metrics import EngineMetrics
from ..request.request import Committed, Request, Scheduled
from ..request.verified_tree import VerifiedTree


class RequestProgress:
    """Takes requests, their drafts and the proposer on together, for the engine, the kit and other engines' drivers."""

    def __init__(
        self,
        drafts: DraftStore,
        host: ProposerHost | None,
        metrics: EngineMetrics,
        release: Callable[[Request], None],
        *,
        may_pad: bool = False,
    ) -> None:
        """`release`: takes back what an ended request holds. `may_pad`: see `ViewBuilder.build`."""
        self._drafts = drafts
        self._host = host
        self._metrics = metrics
        self._release = release
        self._may_pad = may_pad

    def start(self, requests: Sequence[Request]) -> None:
        """Tell the proposer of requests that have their first row."""
        for request in requests:
            if not request.started:
                request.started = True
                if request.num_cached_tokens is not None:
                    self._metrics.counts["prefix_cache_queries"] += request.num_prompt_tokens
                    self._metrics.counts["prefix_cache_hits"] += request.num_cached_tokens
                if self._host:
                    self._host.start(request.view)

    def preempt(self, requests: Sequence[Request]) -> None:
        """Forget the drafts of requests whose rows were taken back, then tell the proposer."""
        self._metrics.counts["num_preemptions"] += len(requests)
        lost = list(map(self._without_row, requests))
        if self._host:
            for view in lost:
                self._host.preempt(view)

    def commit(
        self, share: Scheduled, drafts: list[int], output_ids: list[int], tree: VerifiedTree | None = None
    ) -> Committed:
        """Append the tokens and move the cache length back over rejected rows.

        share: of the batch. drafts: those verified. output_ids: accepted drafts and one token more; none in the middle
        of a prompt. tree: None means a chain.
        """
        widths = None
        if tree is not None:
            widths, drafts = tree.widths, [drafts[node] for node in tree.path_first()]
        request, num_accepted = share.request, max(len(output_ids) - 1, 0)
        if output_ids:
            count = request.commit(output_ids)
            request.num_computed_tokens = len(request.token_ids) - 1
            request.metrics.record(len(drafts), num_accepted, count, widths)
            self._metrics.acceptance.record(len(drafts), num_accepted, count, widths)
            output_ids = output_ids[:count]
        else:
            request.num_computed_tokens = share.start + share.num_tokens
        return Committed.now(share, drafts, num_accepted, output_ids, tree)

    def check_late(self, request_ids: Sequence[str], taken: TakenDrafts, reports: Sequence[DraftReport]) -> None:
        """Hold drafts to the contract that came with the outcome; what verification needs was seen to on the device."""
        self._drafts.count_late(taken, reports)
        stored = zip(request_ids, taken.stored, reports, strict=True)
        late = [(request_id, each.length, report) for request_id, each, report in stored if each.report is None]
        if self._host and late:
            names, budgets, found = zip(*late, strict=True)
            self._host.check_late(names, budgets, found)

    def finish(self, requests: Sequence[Request]) -> None:
        """Release everything that ended requests hold, here and in the proposer."""
        ended = []
        try:
            with uninterrupted():
                for request in sorted(requests, key=lambda request: request.request_id):
                    self._release(request)
                    ended.append(self._without_row(request))
        finally:
            # After everything else, so that a proposer that fails here finds every request in order. By id, not by row:
            # what is learned of requests that end together has one order.
            if self._host:
                for view in ended:
                    self._host.finish(view)

    def _without_row(self, request: Request) -> RequestView:
        """Forget a request's row. Returns it as it was: its old row may be somebody else's before long."""
        view = request.view
        request.row = -1
        return view

    def propose(self, going_on: Sequence[Committed], most: int, computed: Computed) -> CheckedDraft | None:
        """Store a draft for each request that goes on; see `draft_budgets` for `most`. Returns them; None: none."""
        host = self._host
        if host is None or not host.enabled or not going_on:
            return None
        budgets = draft_budgets(going_on, host, most)
        with torch.inference_mode():
            view, own_rows = host.views.build(going_on, budgets, computed, may_pad=self._may_pad)
            draft = host.draft(view, budgets)
        if draft is None:  # perhaps it failed to see these
            for each in going_on:
                each.request.shares_blocks &= host.wants_drafts_for(each.request.request_id)
        else:
            rows, generations = [each.row for each in going_on], [each.generation for each in going_on]
            all_greedy = all(each.request.params.greedy for each in going_on)
            self._drafts.put(rows, generations, draft, own_rows, all_greedy=all_greedy)
        return draft


def draft_budgets(committed: Sequence[Committed], host: ProposerHost, most: int) -> list[int]:
    """The most drafts, `most` at the utmost, that can be of use to each request in its next step."""
    fewest = max(host.needs.min_draft_tokens, 1)
    budgets = []
    for each in committed:
        request = each.request
        budget = min(most, request.most_drafts, request.max_total_tokens - each.length - 1)
        wanted = each.token_ids and budget >= fewest and request.may_be_drafted
        wanted = wanted and host.wants_drafts_for(request.request_id)
        budgets.append(budget if wanted else 0)
    return budgets


INTERRUPTS = [int(each) for each in signal.Signals if each.name in ("SIGINT", "SIGALRM", "SIGTERM")]
"""Signals whose handlers may raise: Ctrl-C, a timeout, an end that is asked for."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back what a signal's handler raises until the block ends. It comes in the main thread, and nowhere else.

    For a few Python statements that belong together, and nothing that may wait or is a plugin's.
    """
    held: dict[int, Any] = {}
    known: dict[int, Any] = {}
    is_main = threading.current_thread() is threading.main_thread()
    try:
        for each in INTERRUPTS if is_main else ():
            if callable(handler := signal.getsignal(each)):
                known[each] = handler
                signal.signal(each, held.setdefault)
        yield
    finally:
        for each, handler in known.items():
            signal.signal(each, handler)
        with ExitStack() as every:  # each, whatever another one raises
            for each, frame in held.items():
                every.callback(known[each], each, frame)
