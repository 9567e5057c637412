"""The cache and the layers of the target, as far as a proposer declared that it uses them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.errors import ProposerError, Refusal
from specdec.sdk.extensions import Extension
from specdec.sdk.needs import E, Needs
from specdec.sdk.types import StepView

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..kernels.attention_spec import AttentionSpec, StoredAttention
from ..model.attention import attention_arguments


@dataclass(frozen=True)
class _Reading:
    """An `AttentionContext` that stores nothing: each layer attends to a layer of the target."""

    stored: StoredAttention
    layers: Sequence[int]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend without new keys and values. [N, Hq, D] -> [N, Hq, Dv]."""
        return self.stored.attend_stored(self.layers[layer], query, spec)


class EarlyPasses:
    """Begins passes at the newest token that would begin before it, and counts how far they were off.

    The host cannot look at where a pass begins without waiting for the device. So the counts of a step are sent to the
    host behind its drafts. They are there when the next step drafts, because its outcome was waited for in between.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._computed = torch.zeros(num_rows, dtype=torch.int64, device=device)  # by row: positions of the target
        self._missing = torch.zeros_like(self._computed)  # by row: positions that a pass of this step began too early
        self._sent: Tensor | None = None  # those of the step before, on the host

    def begin(self, step: StepView) -> None:
        """Passes of this step follow."""
        rows, computed = (each.to(self._computed.device) for each in (step.slots, step.kept.next_position))
        self._computed.index_copy_(0, rows, computed)
        self._missing.zero_()

    def end(self) -> None:
        """End the passes of this step: no more follow."""
        self._sent = self._missing.to("cpu", non_blocking=True, copy=True)

    def behind(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Starts [B] of a pass over rows [B], none of them early. It may be captured."""
        computed = self._computed[rows]
        self._missing.index_copy_(0, rows, torch.maximum(self._missing[rows], computed - starts))
        return torch.maximum(starts, computed)

    def require_none(self) -> None:
        """Raises ProposerError SD-E276 where a pass of the step before began too early."""
        missing = [] if self._sent is None else self._sent.tolist()
        found = {row: count for row, count in enumerate(missing) if count > 0}
        if found:
            named = ", ".join(f"{count} positions before in row {row}" for row, count in list(found.items())[:4])
            when = "the step before; its passes began at the newest tokens instead, and the text is right"
            raise _early_pass("starts of at least `KeptTokens.next_position`", named, when=when)


@dataclass(eq=False)
class TargetCache:
    """The target's cache. There is none at first: it is sized from the memory that a drafter leaves."""

    kv: KVCache = field(init=False)
    addressing: Addressing = field(init=False)
    passes: EarlyPasses | None = None
    """Keeps passes over layers off what the target computed. None: the host looks where each begins."""


@dataclass(frozen=True)
class CachedKV:
    """The target's keys and values."""

    cache: TargetCache
    declared: Collection[int]  # the layers that may be read

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Read keys and values of a slot. Raises Refusal for a layer that was not declared."""
        self._require_declared([layer])
        kv = self.cache.kv
        places = self.cache.addressing.slots_of_row(kv, slot, length)
        return kv.keys[layer][places].clone(), kv.values[layer][places].clone()

    def attention(self, slots: Tensor, lengths: Tensor, layers: Sequence[int]) -> Mapping[str, Any]:
        """Arguments of attention over the target's cache. Raises Refusal for a layer that was not declared."""
        self._require_declared(layers)
        one_each = torch.arange(len(slots) + 1, device=slots.device)
        stored = self.cache.addressing.of_rows(self.cache.kv, slots, lengths - 1, one_each, "causal")
        return attention_arguments(_Reading(stored, layers))

    def _require_declared(self, layers: Collection[int]) -> None:
        if not set(layers) <= set(self.declared):
            declared = ", ".join(map(str, self.declared))
            raise Refusal(f"layers {list(layers)} of the target are read, and {declared} declared", "Needs.target_kv")


RunLayers = Callable[..., Tensor]
"""Layers that run between the target's embedding and its head: see `PartialTarget.__call__`."""


@dataclass(frozen=True)
class CachedLayers:
    """Some of the target's layers."""

    cache: TargetCache
    run: RunLayers

    def logits(
        self,
        token_ids: Tensor,
        slots: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        wanted: Tensor,
        adapted: Tensor | None = None,
    ) -> Tensor:
        if self.cache.passes is None:
            self._require_free(slots, starts)
        else:
            starts = self.cache.passes.behind(slots, starts)
        context = self.cache.addressing.of_rows(self.cache.kv, slots, starts, cu_queries, "causal")
        token = torch.arange(len(token_ids), device=token_ids.device)
        owner = torch.searchsorted(cu_queries[1:], token, right=True)
        return self.run(token_ids, starts[owner] + token - cu_queries[owner], wanted, context, adapted)

    def _require_free(self, rows: Tensor, starts: Tensor) -> None:
        """Nobody writes over what the target computed. Raises ProposerError SD-E276."""
        computed = self.cache.addressing.num_computed(rows)
        if bool((starts < computed).any()):
            raise _early_pass(
                f"starts of at least {computed.tolist()}, `KeptTokens.next_position`", str(starts.tolist())
            )


def _early_pass(expected: str, found: str, **facts: str) -> ProposerError:
    """SD-E276."""
    why = "the keys and values before are the target's own, and its text depends on them"
    told = {"expected": expected, "found": found, "why": why, **facts}
    return ProposerError("SD-E276", "a draft pass would write over what the target computed", told)


OwnLayers = Callable[[Sequence[int], Mapping[str, nn.Module]], RunLayers]
"""Makes some of the target's layers run by themselves, with an adapter (`specdec.sdk.Services.target_layers`).

Raises Refusal where they cannot, CheckpointError SD-E297 where the adapter does not fit.
"""


def not_asked_for(extension: type[Extension], service: str) -> Refusal:
    """The error for a service of an extension that a proposer did not ask for."""
    reason = f"{service} belongs to {extension.id}, which it did not ask for"
    return Refusal(reason, f"needs = Needs(extensions=({extension.__name__}(...), ...))")


def require(needs: Needs, extension: type[E], service: str) -> E:
    """The entry of the extension that a service belongs to. Raises Refusal unless the proposer asked for it."""
    asked = needs.extension(extension)
    if asked is None:
        raise not_asked_for(extension, service)
    return asked
