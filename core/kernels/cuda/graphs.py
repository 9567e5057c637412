"""Work of a few shapes, captured once on a device: its many launches then cost the host one.

What is captured reads its inputs from fixed places and leaves its outputs in fixed places. Work of any other shape is
padded to the next captured one, or runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.sdk.errors import ConfigError, message

from ...cache.addressing import Addressing
from ...cache.kv_cache import KVCache
from ...cache.state_store import EvenPass, StatePass
from ...model.target import ForwardInput, Target, TargetOutput
from .block_table import BlockTable
from .buckets import Bucket, batch_sizes, buckets, stateful_buckets
from .capture import CudaCapturer, Work, copy_together, fill_together
from .paged_view import PagedView
from .static_inputs import StaticInputs
from .warm_up import warm_up_target

logger = logging.getLogger("specdec")

Rows = Tensor | tuple[Tensor, ...]  # with one row per request


class GraphedTarget:
    """A target whose steps of few tokens are captured. Its outputs are valid until the next step."""

    def __init__(
        self, target: Target, cache: KVCache, table: BlockTable, shapes: Sequence[Bucket], num_nodes: int = 0
    ) -> None:
        """`shapes`: the largest first. `num_nodes`: the most of a tree; 0: no step has one."""
        self._target = target
        self._cache, self._table = cache, table
        most = max(bucket.num_requests for bucket in shapes)
        self._inputs = StaticInputs(shapes[0], most, self._table.pad_row, cache.device, num_nodes)
        self._shapes = shapes
        self._captured_passes: dict[Bucket, Work] = {}
        self._logits: Tensor | None = None  # [most rows, V]
        self._hidden: tuple[Tensor, ...] = ()  # L of [most tokens, H]

    def capture(self, capturer: CudaCapturer) -> None:
        """Capture every shape. Raises RuntimeError if the model cannot be captured."""
        for bucket in self._shapes:
            self._captured_passes[bucket] = capturer.capture(partial(self._run, bucket))

    def _run(self, bucket: Bucket) -> None:
        inputs, count, requests = self._inputs, bucket.num_tokens, bucket.num_requests
        view = PagedView(
            self._cache,
            self._table,
            inputs.rows[:requests],
            inputs.starts[:requests],
            inputs.cu_queries[: requests + 1],
            bucket.num_queries,
            tree=inputs.trees_of(bucket),
        )
        states = None
        if self._cache.states is not None:
            store, num_drafts = self._cache.states, bucket.num_queries - 1
            states = EvenPass(store, rows=view.rows, num_reread=bucket.num_reread, num_drafts=num_drafts)
        output = self._target.forward(
            ForwardInput(
                inputs.token_ids[:count], inputs.positions[:count], inputs.logits_rows[: bucket.num_rows], view, states
            )
        )
        if self._logits is None:  # the largest, run before anything is captured
            self._logits = torch.empty_like(output.logits)
            self._hidden = tuple([torch.empty_like(state) for state in output.hidden])
        self._logits[: bucket.num_rows].copy_(output.logits)
        for kept, state in zip(self._hidden, output.hidden, strict=True):
            kept[:count].copy_(state)

    def forward(self, batch: ForwardInput) -> TargetOutput:
        """Run a pass as `TargetModel.forward` does, from a graph where one was captured."""
        assert isinstance(batch.cache, PagedView), "the view of a device"
        bucket = self.bucket_of(batch.cache, len(batch.token_ids), batch.states)
        if bucket is None:
            return self._target.forward(batch)
        assert self._logits is not None, "made when the shape was captured"
        self._inputs.load(batch, batch.cache, bucket)
        with nullcontext() if batch.states is None else batch.states.store.passing(batch.states):
            self._captured_passes[bucket]()
        hidden = tuple([state[: len(batch.token_ids)] for state in self._hidden])
        return TargetOutput(self._logits[: len(batch.logits_rows)], hidden)

    def bucket_of(self, view: PagedView, num_tokens: int, states: StatePass | None = None) -> Bucket | None:
        """The smallest captured shape that has room for a pass; None if none has."""
        requests, most = len(view.rows), view.max_queries
        assert most is not None, "the host plans a step"
        even = None if states is None else states.even
        if states is not None and even is None:
            return None
        num_reread = even and even[0]
        smallest_first = reversed(self._captured_passes)
        return next((each for each in smallest_first if each.holds(requests, num_tokens, most, num_reread)), None)


class GraphedFunction:
    """A function of tensors with one row per request, captured for all numbers of rows when it is first called.

    Missing rows are copies of others: they are computed again, and what they write is written twice. The result is
    valid until the next call. Where capturing fails, and where nothing is computed because the result is a view of an
    argument, the function runs as it is from then on.
    """

    def __init__(self, function: Callable[..., Rows], capturer: CudaCapturer, sizes: Sequence[int]) -> None:
        self._function = function
        self._capturer: CudaCapturer | None = capturer
        self._sizes = sizes
        self._captured: dict[tuple[object, ...], dict[int, tuple[list[Tensor], Work, Rows]]] = {}  # by kind and size
        self._largest: dict[tuple[object, ...], Tensor] = {}  # what the places of all sizes are the front of

    def __call__(self, *tensors: Tensor) -> Rows:
        """The function's result, row by row."""
        count = len(tensors[0])
        size = next((size for size in self._sizes if size >= count), None)
        if size is None or self._capturer is None:
            return self._function(*tensors)
        kind = tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)
        if kind not in self._captured:
            try:
                self._captured[kind] = {each: self._capture(each, tensors) for each in reversed(self._sizes)}
            except RuntimeError as error:
                if not isinstance(error, _NothingComputed):
                    logger.warning("a draft network cannot be captured as a CUDA graph and runs without: %s", error)
                self._capturer = None
                return self._function(*tensors)
        inputs, launch, results = self._captured[kind][size]
        fill_together(zip(inputs, tensors, tensors, strict=True))  # a size is at most twice the rows, which are enough
        launch()
        return results[:count] if isinstance(results, Tensor) else tuple([each[:count] for each in results])

    def _capture(self, size: int, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Work, Rows]:
        """The places of the arguments, what launches the function upon them, and where it leaves its results.

        Raises RuntimeError where it cannot be captured.
        """
        assert self._capturer is not None
        rows = torch.arange(size, device=tensors[0].device) % len(tensors[0])
        inputs = [self._place(index, size, tensor) for index, tensor in enumerate(tensors)]
        copy_together(inputs, [tensor[rows] for tensor in tensors])
        with _Computing() as computing:
            found = self._function(*inputs)
        if not computing.seen:
            raise _NothingComputed
        results = [self._place(f"result {index}", size, each) for index, each in enumerate(_each(found))]

        def work() -> None:
            copy_together(results, _each(self._function(*inputs)))

        launch = self._capturer.capture(work)
        return inputs, launch, results[0] if isinstance(found, Tensor) else tuple(results)

    def _place(self, name: object, size: int, like: Tensor) -> Tensor:
        """Memory outside of the graphs' pool for so many rows."""
        key = (name, like.shape[1:], like.dtype)
        if key not in self._largest:
            self._largest[key] = like.new_empty(self._sizes[-1], *like.shape[1:])
        return self._largest[key][:size]


class _NothingComputed(RuntimeError):
    """A result is a view of an argument."""


def _each(result: Rows) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


class _Computing(TorchDispatchMode):
    """Whether anything inside computes: an operator that is no view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or not function.is_view
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Passes:
    """What an engine captures: its target's steps at the start, its proposer's passes when they are first called."""

    capturer: CudaCapturer | None  # None: passes run as they are
    max_num_seqs: int
    max_tokens: int  # of a step
    required: bool  # whether a target that cannot be captured is an error

    @classmethod
    def of(
        cls,
        asked: bool | None,
        device: torch.device,
        target_waits: bool,
        max_num_seqs: int,
        max_tokens: int,
        capturer: Callable[[torch.device], CudaCapturer] = CudaCapturer,
    ) -> Passes:
        """asked: as `EngineConfig.cuda_graphs`. target_waits: in passes. Raises ConfigError SD-E234 if both hold."""
        if target_waits and asked is not False:
            _refuse(asked)
        captures = not target_waits and asked is not False
        return cls(capturer(device) if captures else None, max_num_seqs, max_tokens, required=asked is True)

    @staticmethod
    def num_tokens(max_num_seqs: int, num_draft_tokens: int, max_tokens: int) -> int:
        """Tokens of the largest pass that is captured."""
        return buckets(max_num_seqs, num_draft_tokens, max_tokens)[0].num_tokens

    def target(
        self, target: Target, cache: KVCache, addressing: Addressing, num_draft_tokens: int, num_nodes: int = 0
    ) -> Target:
        """The target, warmed up, with its small steps captured; itself where that fails.

        num_nodes: the most of a tree; 0: drafts are chains. Raises ConfigError SD-E147 if it is required.
        """
        table: BlockTable = addressing.table
        warm_up_target(target, cache, table, num_nodes)
        if self.capturer is None:
            return target
        shapes_of = buckets if cache.states is None else stateful_buckets
        shapes = shapes_of(self.max_num_seqs, num_draft_tokens, self.max_tokens)
        graphed = GraphedTarget(target, cache, table, shapes, num_nodes)
        try:
            graphed.capture(self.capturer)
        except RuntimeError as error:
            if self.required:
                raise ConfigError("SD-E147", "the target cannot be captured", {"because": error}) from error
            logger.warning("the target cannot be captured as CUDA graphs and runs without: %s", error)
            return target
        return graphed

    def function(self, function: Callable[..., Rows]) -> Callable[..., Rows]:
        """A function with one row per request, captured."""
        if self.capturer is None:
            return function
        return GraphedFunction(function, self.capturer, batch_sizes(self.max_num_seqs))


def _refuse(asked: bool | None) -> None:
    """Raises ConfigError SD-E234 if capturing was asked for; warns else."""
    what = "a step with moe_backend='eager' cannot be captured"
    facts = {
        "because": "it waits for the device in every layer, to read which experts are wanted",
        "fix": "leave moe_backend out, or set grouped_mm or batched_mm",
    }
    if asked:
        raise ConfigError("SD-E234", what, facts)
    logger.warning("%s", message("SD-W306", what, facts | {"so": "each of its kernels is launched, more slowly"}))
