"""Plans how many tokens each request computes in the next step. It alone owns the queues, the rows and the blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..cache.block_pool import BlockPool
from ..cache.row_table import RowTable
from ..cache.state_store import StateStore
from ..request.request import Request, Scheduled


@dataclass(frozen=True)
class Schedule:
    """The plan of one step."""

    shares: list[Scheduled]
    preempted: list[Request]


class Scheduling(Protocol):
    """Plans steps: first come, first served in an engine, or as a script says."""

    def schedule(self, num_drafts: Callable[[Request], int]) -> Schedule:
        """Plan a step; `num_drafts` says how many drafts wait for a request."""
        ...

    def finish(self, request: Request) -> None:
        """Take back what an ended request holds."""
        ...


class Scheduler(RowTable):
    """First come, first served, within a budget of tokens, rows and blocks.

    A prompt is computed in chunks that fit the token budget. Drafts lose their ends where they would take the place of
    another request's newest token. When blocks run out, the youngest running request gives
    its blocks back and is recomputed later. The oldest one always advances, so nothing starves.

    A request begins behind the blocks of its text that the pool knows. It waits a step for those that another request
    fills in this one, where these are most of what it lacks.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        draft_lookahead: int = 0,
        states: StateStore | None = None,
    ) -> None:
        """states: of a target whose layers keep one."""
        super().__init__(max_num_seqs, pool)
        self.waiting: deque[Request] = deque()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._draft_lookahead = draft_lookahead
        self._states = states

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def schedule(self, num_drafts: Callable[[Request], int]) -> Schedule:
        """Plan the next step, as `Scheduling.schedule` says."""
        shares: list[Scheduled] = []
        for request in self.running if self.pool.known else ():
            num_full = request.num_computed_tokens // self.pool.block_size
            if request.shares_blocks and num_full > request.num_known_blocks:
                self._learn(request)
        preempted = self._without_state() if self._states else []
        budget = self._max_num_batched_tokens
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            behind = len(self.running) - position - 1
            share = self._share(request, budget, num_drafts(request), behind)
            while not self._reserve(share):
                if share.num_draft_tokens:  # cut at its end, so that no token's own draw decides whether it is verified
                    share = share._replace(num_draft_tokens=share.num_draft_tokens - 1)
                    continue
                preempted.append(self._preempt(self.running[-1]))
                if preempted[-1] is request:
                    break
            else:
                budget -= share.num_tokens + share.num_draft_tokens
                shares.append(share)
                position += 1
        if not preempted:
            self._admit(shares, budget)
        return Schedule(shares, preempted)

    def _without_state(self) -> list[Request]:
        """Preempt requests whose state an interrupted step left half advanced: they are computed anew."""
        assert self._states is not None
        fits = self._states.fits
        lost = [each for each in self.running if not fits(each.row, each.generation, each.num_computed_tokens)]
        return [self._preempt(each) for each in reversed(lost)]

    def _share(self, request: Request, budget: int, num_drafts: int, behind: int = 0) -> Scheduled:
        """behind: running requests whose newest tokens go before this one's drafts."""
        uncomputed = request.num_uncomputed_tokens
        num_tokens, samples = min(uncomputed, budget), uncomputed <= budget
        num_drafts = max(min(num_drafts, budget - num_tokens - behind), 0) if samples else 0
        first_token = self._max_num_batched_tokens - budget
        return Scheduled(request, request.num_computed_tokens, num_tokens, num_drafts, samples, first_token)

    def _reserve(self, share: Scheduled) -> bool:
        """Give the request blocks for its share. False where too few are free."""
        num_positions = share.start + share.num_tokens + share.num_draft_tokens + self._draft_lookahead
        return self.pool.extend(share.request.blocks, num_positions)

    def _admit(self, shares: list[Scheduled], budget: int) -> None:
        while self.waiting and self.num_free and budget > 0:
            request = self.waiting[0]
            found = self.pool.find(request.params.namespace, request.token_ids)
            if not self.pool.can_extend(found, len(request.token_ids) + self._draft_lookahead):
                return  # the whole prompt has room or it waits: half a prompt in the cache helps nobody
            if self.pool.known and self._waits(request, len(found) * self.pool.block_size, shares):
                return
            self.seat(self.waiting.popleft())
            self._begin(request, found)
            share = self._share(request, budget, 0)
            self._reserve(share)
            budget -= share.num_tokens
            shares.append(share)

    def _waits(self, request: Request, num_found: int, shares: Sequence[Scheduled]) -> bool:
        """Whether another request computes in this step at least half of what this one lacks, in full blocks."""
        size, length = self.pool.block_size, len(request.token_ids)
        stop = -(-(num_found + length) // (2 * size)) * size
        return num_found < stop < length and any(
            each.start < stop <= each.start + each.num_tokens
            and each.request.params.namespace == request.params.namespace
            and each.request.token_ids[:stop] == request.token_ids[:stop]
            for each in shares
        )

    def _begin(self, request: Request, found: list[int]) -> None:
        """found: blocks of its text that it need not compute."""
        if self.pool.known:
            self.pool.share(found)
            request.blocks += found
            request.num_known_blocks = len(found)
            request.begin_behind(len(found) * self.pool.block_size)

    def _learn(self, request: Request) -> None:
        """Others find the blocks that are full by now."""
        assert self.pool.known is not None
        text = request.params.namespace, request.token_ids
        self.pool.known.learn(request.blocks, *text, request.num_computed_tokens)
        request.num_known_blocks = request.num_computed_tokens // self.pool.block_size

    def _preempt(self, request: Request) -> Request:
        self.unseat(request)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        return request

    def finish(self, request: Request) -> None:
        """Take a request out of its queue and its row and blocks back."""
        if request in self.running:
            if self.pool.known and self.pool.known.learns_at_ends and request.shares_blocks:
                self._learn(request)
            self.unseat(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def forget_blocks(self) -> None:
        """No text finds a block that holds something now, nor what running requests write behind those."""
        self.pool.forget_all()
        for request in self.running:
            request.shares_blocks = False

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks and rows are each owned once and the step's invariant holds."""
        super().check_integrity()
        for request in self.running:
            has_kv, committed = request.num_computed_tokens, len(request.token_ids)
            assert has_kv < committed, f"{request.request_id}: {has_kv} tokens with KV of {committed}"
            assert len(request.blocks) * self.pool.block_size >= has_kv, f"{request.request_id}: KV without a block"
