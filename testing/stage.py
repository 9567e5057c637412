"""An engine without a target: it shows one proposer whatever a scheduler could do, with the engine's own views."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from specdec.core.cache.block_pool import BlockPool
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.proposing.draft_check import DraftChecker
from specdec.core.proposing.draft_store import DistributionBuffers, DraftStore
from specdec.core.proposing.proposer_host import ProposerHost
from specdec.core.proposing.view_guard import Snapshot
from specdec.core.proposing.views import ViewBuilder
from specdec.core.registry import LoadedProposer, construct
from specdec.core.request.committed import Committed
from specdec.core.request.metrics import EngineMetrics
from specdec.core.request.request import Request
from specdec.core.runner.batch import BatchItem, Scheduled, take_drafts
from specdec.core.runner.scheduler import Scheduler
from specdec.sdk.errors import ProposerError
from specdec.sdk.needs import Needs
from specdec.sdk.types import StepView, TargetInfo

from .moves import LONG, PARAMS, GivenUniforms, Move, Shown
from .report import Violation, cause_of
from .step_tensors import HiddenStandIns, spoil_history, tokens_of
from .text import Script
from .watch import watched
from .worlds import World

Answer = TypeVar("Answer")

CPU = torch.device("cpu")


class Stage:
    """One proposer, requests, and no opinion on who is scheduled when: every step is given as a list of moves."""

    def __init__(
        self, loaded: LoadedProposer, info: TargetInfo, world: World, *, seed: int = 0, shown: Needs | None = None
    ) -> None:
        """`shown`: the needs that views are built for, where they are not the declared ones."""
        self.info, self.needs, self.seed = info, loaded.needs, seed
        self.script = Script(seed, info.vocab_size)
        self.reads: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.number = 0
        self.num_preemptions = 0
        self._k = loaded.config.num_draft_tokens
        self._probabilistic = loaded.config.draft_sample_method == "probabilistic"
        self._shown = shown or loaded.needs
        self._lookahead = loaded.needs.draft_kv.rows_per_pass if loaded.needs.draft_kv else 0
        longest = -(-(info.max_model_len + self._lookahead) // info.block_size)
        self._pool = BlockPool(longest * info.max_num_seqs, info.block_size, region_size=longest)
        self._scheduler = Scheduler(self._pool, info.max_num_seqs, info.max_model_len, self._lookahead)
        self._free_rows = list(reversed(range(info.max_num_seqs)))
        self._generations = [0] * info.max_num_seqs
        self._store = DraftStore(DistributionBuffers.none())
        self._hidden = HiddenStandIns(info, len(self._shown.hidden_states), seed) if self._shown.hidden_states else None
        self._views = ViewBuilder(self._shown, self._k, info.max_num_seqs, info.max_model_len, CPU)
        checker = DraftChecker(loaded.plugin, loaded.needs, info.vocab_size, CPU)
        metrics = EngineMetrics(info.model, loaded.plugin.label)
        self._host = ProposerHost(construct(loaded), loaded, checker, self._views, "raise", metrics, lambda error: None)
        self._host.bind(info, world.lend(info, loaded.needs.draft_kv, self._scheduler, self.reads))

    @property
    def host(self) -> ProposerHost:
        """The proposer behind the engine's own guard."""
        return self._host

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def params_for(self, name: str) -> SamplingParams:
        """Greedy, and where drafts are probabilistic sampled in different ways, by the request's name."""
        return PARAMS[zlib.crc32(name.encode()) % len(PARAMS)] if self._probabilistic else LONG

    def add(self, name: str, prompt: Sequence[int] | int, params: SamplingParams | None = None) -> Request:
        """A request that waits; `prompt` is its tokens or their number."""
        params = params or self.params_for(name)
        token_ids = self.script.prompt(name, prompt) if isinstance(prompt, int) else list(prompt)
        self.requests[name] = Request(
            request_id=name,
            prompt_token_ids=token_ids,
            params=params,
            seed=zlib.crc32(f"{self.seed}:{name}".encode()),
            max_total_tokens=min(len(token_ids) + params.max_tokens, self.info.max_model_len),
            end_token_ids=frozenset(),
            detokenizer=None,
        )
        return self.requests[name]

    def preempt(self, name: str) -> None:
        """Take the request's row and KV; its next move replays it from position 0."""
        request = self.requests[name]
        self.num_preemptions += 1
        self._leave(request)
        request.num_computed_tokens = 0
        self._call(lambda: self._host.preempt(request.view))
        request.row = -1

    def finish(self, name: str) -> None:
        """End the request where it stands: done, or aborted."""
        request = self.requests.pop(name)
        if request.row >= 0:
            self._leave(request)
        self._call(lambda: self._host.finish(request.view))

    def step(self, moves: Sequence[Move], *, width: int | None = None, uniforms: Tensor | None = None) -> Shown | None:
        """One step in the order of `moves`; None if no request goes on.

        `width`: K of this step, if not the usual. `uniforms` [B, K] float64: the numbers of `step.random`, where the
        caller wants to choose them.
        """
        self.number += 1
        items, drafted = self._items([self._share(move) for move in moves])
        tokens = tokens_of(items, drafted)
        committed = [self._commit(*each) for each in zip(items, drafted, moves, strict=True)]
        for name in sorted(each.request.request_id for each in committed if each.request.finish_reason is not None):
            self.finish(name)
        going_on = [each for each in committed if each.request.finish_reason is None]
        if not going_on:
            return None
        budgets = [self._budget(each, self._k if width is None else width) for each in going_on]
        hidden = None if self._hidden is None else self._hidden.of(tokens)
        view = self._views.build(going_on, budgets, tokens, hidden)
        if width is not None:
            view = replace(view, num_draft_tokens=width)
        return self._ask(view if uniforms is None else replace(view, random=GivenUniforms(uniforms)), budgets)

    def replay(self, original: Request, name: str) -> Shown:
        """Show another stage's request under a name and in a row of its own, as a fresh prefill of its tokens."""
        request = self.add(name, original.prompt_token_ids, original.params)
        request.seed, request.token_ids = original.seed, original.token_ids[:-1]
        self._place(request)
        self.preempt(name)
        shown = self.step([Move(name, forced=original.token_ids[-1])])
        assert shown is not None, "the original goes on"
        return shown

    def _share(self, move: Move) -> Scheduled:
        request = self.requests[move.name]
        if request.row < 0:
            self._place(request)
        missing = request.num_uncomputed_tokens
        num_tokens = missing if move.num_tokens is None else min(move.num_tokens, missing)
        room = request.max_total_tokens - len(request.token_ids) - 1
        waiting = self._store.length(request.row, request.generation)
        num_drafts = min(waiting, room) if num_tokens == missing else 0
        last = request.num_computed_tokens + num_tokens + num_drafts + self._lookahead
        self._pool.extend(request.blocks, last)
        return Scheduled(request, request.num_computed_tokens, num_tokens, num_drafts, num_tokens == missing)

    def _place(self, request: Request) -> None:
        """A row of its own, the one that was given back last: rows change hands as early as they can."""
        request.row = self._free_rows.pop()
        self._generations[request.row] += 1
        request.generation = self._generations[request.row]
        self._scheduler.running.append(request)
        if not request.started:
            request.started = True
            self._call(lambda: self._host.start(request.view))

    def _leave(self, request: Request) -> None:
        self._store.drop(request.row)
        self._scheduler.running.remove(request)
        self._pool.release(request.blocks)
        self._free_rows.append(request.row)

    def _items(self, shares: Sequence[Scheduled]) -> tuple[list[BatchItem], list[list[int]]]:
        drafted = take_drafts(shares, self._store).token_ids
        items: list[BatchItem] = []
        first = 0
        for share, drafts in zip(shares, drafted, strict=True):
            items.append(BatchItem(share, first, len(drafts)))
            first += items[-1].num_rows
        return items, drafted

    def _commit(self, item: BatchItem, drafts: list[int], move: Move) -> Committed:
        share, request = item.scheduled, item.scheduled.request
        place = (request, item.first_token, item.num_rows, share.start)
        if not share.samples:
            request.num_computed_tokens += share.num_tokens
            return Committed.now(*place, [], 0, [])
        name, length = request.request_id, len(request.token_ids)
        accepted = self.script.num_accepted(name, length, len(drafts))
        if move.num_accepted is not None:
            accepted = min(move.num_accepted, len(drafts))
        rejected = drafts[accepted] if accepted < len(drafts) else None
        next_token = move.forced
        if next_token is None:
            next_token = self.script.token(name, [*request.token_ids, *drafts[:accepted]], rejected)
        count = request.commit([*drafts[:accepted], next_token])
        request.num_computed_tokens = len(request.token_ids) - 1
        return Committed.now(*place, drafts, accepted, request.token_ids[len(request.token_ids) - count :])

    def _budget(self, each: Committed, width: int) -> int:
        limits = [width, each.request.max_total_tokens - len(each.request.token_ids) - 1]
        if each.request.params.num_speculative_tokens is not None:
            limits.append(each.request.params.num_speculative_tokens)
        useful = each.token_ids and min(limits) >= max(self.needs.min_draft_tokens, 1)
        return min(limits) if useful else 0

    def _ask(self, view: StepView, budgets: list[int]) -> Shown:
        if view.history is not None:
            spoil_history(view.history, view, random.Random(self.number), self.info.vocab_size)
        before = Snapshot(view)
        where = f"step {self.number} of seed {self.seed}, requests {_some(view.request_ids)}"
        with torch.inference_mode():
            checked = self._call(lambda: self._host.draft(watched(view, self.reads), budgets), where)
        drafts = checked.token_ids if checked else [[] for _ in budgets]
        if checked:
            self._store.put(view.rows.tolist(), view.generation.tolist(), checked)
        return Shown(
            where,
            view,
            budgets,
            drafts,
            checked.distribution if checked else None,
            [str(change) for change in before.changes()],
        )

    def _call(self, call: Callable[[], Answer], where: str = "") -> Answer:
        try:
            return call()
        except ProposerError as error:
            raise Violation(
                expected="no exception, and a draft that fits the step",
                found=str(error),
                where=where or f"before step {self.number + 1} of seed {self.seed}",
                fix="correct the line that is named; the contract is the docstring of specdec.sdk.StepView and Draft; "
                "a field of StepView that is not declared in needs is None",
                cause=cause_of(error),
            ) from error


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    few = 6
    return ", ".join(names[:few]) + (f" and {len(names) - few} more" if len(names) > few else "")
