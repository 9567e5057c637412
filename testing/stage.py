"""The engine's own step without a target: it shows one proposer whatever a scheduler could do."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec import SamplingParams
from specdec.core.host import (
    Addressing,
    BlockPool,
    DistributionBuffers,
    DraftStore,
    EngineMetrics,
    KVCache,
    Request,
    RowTable,
    Runner,
    ViewBuilder,
    profile_of,
    registry,
)
from specdec.sdk.errors import ProposerError
from specdec.sdk.extensions import DraftKV, TargetKV, TargetLayers, Trees
from specdec.sdk.needs import Needs
from specdec.sdk.types import TargetInfo

from .moves import LONG, PARAMS, Move, Shown
from .report import Violation, cause_of
from .scripted import Scripted
from .step_tensors import StandInTarget
from .text import Script
from .watch import Uses, WatchedHost
from .worlds import World

CPU = torch.device("cpu")


class Stage:
    """A proposer and requests without a scheduler: a list of moves says what happens in every step."""

    def __init__(
        self,
        loaded: registry.LoadedProposer,
        info: TargetInfo,
        world: World,
        *,
        seed: int = 0,
        shown: Needs | None = None,
    ) -> None:
        """`shown`: the needs that views are built for, where they are not the declared ones."""
        self.info, self.needs, self.seed = info, loaded.needs, seed
        self._loaded = loaded
        self.script = Script(seed, info.vocab_size)
        self.uses = Uses()
        self.number = 0
        self._lengths: dict[str, int] = {}  # of the last step's requests, before it
        self.num_preemptions = 0
        self._probabilistic = loaded.config.draft_sample_method == "probabilistic"
        shown, width = shown or loaded.needs, loaded.config.width
        lookahead = loaded.needs.lookahead
        longest = -(-(info.max_model_len + lookahead) // info.block_size)
        pool = BlockPool(longest * info.max_num_seqs, info.block_size, region_size=longest)
        rows = RowTable(info.max_num_seqs, pool)
        metrics = EngineMetrics(info.model, loaded.plugin.label)
        views = ViewBuilder(shown, width, info, CPU)
        self.host = WatchedHost(loaded, info, CPU, views, metrics, self.uses)  # the engine's own guard of the proposer
        shapes = world.layer_shapes if loaded.needs.extension(TargetKV) or loaded.needs.extension(TargetLayers) else ()
        self._cache = KVCache(shapes, pool.num_blocks, info.block_size, getattr(torch, info.dtype), CPU)
        self._services = world.services(info, loaded.needs, rows, self._cache, self.uses)
        self.host.bind(info, self._services)
        self.host.warm_up()
        self._scripted = Scripted(self.script, rows, lookahead)
        self.requests = self._scripted.requests  # those that have not ended
        self._runner = Runner(
            StandInTarget(info, len(shown.hidden_states), seed, shows_logits=views.num_top > 0),
            self._cache,
            self._scripted,
            DraftStore(DistributionBuffers.none(), keeps_trees=loaded.needs.extension(Trees) is not None),
            metrics,
            self.host,
            addressing=Addressing(rows, profile_of(CPU, "torch").backend),
            rule=self._scripted.verify,
        )
        self._closed = False

    def close(self) -> None:
        """Close the proposer, once. Raises ProposerError. Its state is not saved: another stage would load it."""
        if not self._closed:
            self._closed = True
            self.host.must("close")

    @property
    def num_free_rows(self) -> int:
        return self._scripted.rows.num_free

    def params_for(self, name: str) -> SamplingParams:
        """Greedy, and where drafts depend on more than that sampled in different ways, by the request's name."""
        varied = self._probabilistic or self.needs.sampling
        return PARAMS[zlib.crc32(name.encode()) % len(PARAMS)] if varied else LONG

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
            options=self._loaded.read_request(params.extra_args, name),
        )
        return self.requests[name]

    def add_behind(self, name: str, other: str, num_cached: int, prompt: Sequence[int]) -> Request:
        """A request with a row, whose first `num_cached` tokens are in the cache: those that another one begins with.

        Draft KV and the target's keys are carried over, as an engine's prefix cache does.
        """
        request, source = self.add(name, prompt), self.requests[other]
        assert prompt[:num_cached] == source.token_ids[:num_cached], "the same tokens"
        self._scripted.rows.seat(request)
        self._scripted.rows.pool.extend(request.blocks, num_cached)
        self._carry(source, request, num_cached)
        request.num_computed_tokens = num_cached
        return request

    def _carry(self, source: Request, request: Request, num_tokens: int) -> None:
        """Copy keys and values of the first tokens: the target's, in blocks of one token, and those of draft KV."""
        for stored in (*self._cache.keys, *self._cache.values):
            stored[request.blocks[:num_tokens]] = stored[source.blocks[:num_tokens]]
        draft_kv = self.needs.extension(DraftKV)
        if draft_kv is None:
            return
        store, positions = self._services.draft_kv(), torch.arange(num_tokens)
        for layer in range(draft_kv.num_layers):
            keys, values = store.read(layer, source.row, num_tokens)
            store.write(layer, torch.full_like(positions, request.row), positions, keys.clone(), values.clone())

    def preempt(self, name: str) -> None:
        """Take the request's row and KV; its next move computes it again from position 0."""
        request = self.requests[name]
        self.num_preemptions += 1
        self._scripted.rows.unseat(request)
        request.num_computed_tokens = 0
        self._call(lambda: self._runner.progress.preempt([request]))

    def finish(self, name: str, *, late: bool = False) -> None:
        """End the request where it stands: done, or aborted.

        late: it had ended before its last step, which showed it once too many.
        """
        request = self.requests[name]
        if late:
            del request.token_ids[max(self._lengths.get(name, 0), len(request.prompt_token_ids)) :]
        request.abort()
        self._call(lambda: self._runner.finish([request]))

    def ask_metrics(self) -> None:
        """What a reader of metrics does between steps. Raises Violation for what cannot be shown."""
        self._call(self.host.told_metrics)

    def idle(self, *, dummy: bool) -> None:
        """A step without requests."""
        self.host.begin(self.number, self.seed, dummy=dummy)
        self._call(lambda: self.host.draft(self.host.views.idle(), []))

    def idle_with(self, num_requests: int) -> None:
        """A dummy step of requests that are not started and not finished."""
        names = [f"nobody {number}" for number in range(num_requests)]
        for name in names:
            self.add(name, 5).started = True
        self._scripted.moves = [Move(name) for name in names]
        self.host.begin(self.number, self.seed, dummy=True)
        self._call(lambda: self._runner.step([]), "a dummy step")
        for name in names:
            self.finish(name)

    def step(self, moves: Sequence[Move], *, width: int | None = None, uniforms: Tensor | None = None) -> Shown | None:
        """Take a step in the order of `moves`. None means that no request goes on.

        `width`: K of this step, if not the usual. `uniforms` [B, K] float64: the numbers of `step.random`, where the
        caller wants to choose them.
        """
        self.number += 1
        self._lengths = {move.name: len(self.requests[move.name].token_ids) for move in moves}
        self.host.begin(self.number, self.seed, width, uniforms)
        self._scripted.moves = moves
        self._call(lambda: self._runner.step([]), f"step {self.number} of seed {self.seed}")
        return self.host.shown

    def advance(self, moves: Sequence[Move], *, uniforms: Tensor | None = None) -> Shown:
        """Take a step of requests that go on after it. uniforms: see `step`."""
        shown = self.step(moves, uniforms=uniforms)
        assert shown is not None, "these requests are long"
        return shown

    def prefill_of(self, original: Request, name: str) -> Shown:
        """Show another stage's request under a name and in a row of its own, as a fresh prefill of its tokens."""
        request = self.add(name, original.prompt_token_ids, original.params)
        request.seed, request.token_ids = original.seed, original.token_ids[:-1]
        self._scripted.rows.seat(request)
        self._call(lambda: self._runner.progress.start([request]))
        self.preempt(name)
        return self.advance([Move(name, forced=original.token_ids[-1])])

    def _call(self, call: Callable[[], object], where: str = "") -> None:
        try:
            call()
        except ProposerError as error:
            raise Violation(
                expected="no exception, and a draft that fits the step",
                found=str(error),
                where=where or f"before step {self.number + 1} of seed {self.seed}",
                fix="correct the line that is named; the contract is the docstring of specdec.sdk.StepView and Draft; "
                "a field of StepView that is not declared in needs is None",
                cause=cause_of(error),
            ) from error
