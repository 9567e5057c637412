"""The host form of a step that was built for a device: for a part on the host beside one on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..extensions import RejectedTokens
from ..types import DraftRandom, KeptTokens, SamplingView, StepView, TokenHistory

View = TypeVar("View", StepView, KeptTokens, RejectedTokens, SamplingView)
BY_ENTRY = ("positions", "token_ids", "next_token_ids", "top_ids", "top_logprobs")
"""Columns of kept and of rejected tokens, beside hidden states."""


@dataclass(frozen=True)
class HostRandom:
    """The same numbers, on the host."""

    random: DraftRandom

    def uniform(self, draft_index: int) -> Tensor:
        """[B] float64."""
        return self.random.uniform(draft_index).cpu()


@dataclass(frozen=True)
class HostHistory:
    """The same tokens, on the host."""

    history: TokenHistory

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        return self.history.token_ids(request, start)

    def of(self, request: int, start: int = 0) -> Tensor:
        return self.history.of(request, start).cpu()

    def tail(self, num_tokens: int) -> Tensor:
        return self.history.tail(num_tokens).cpu()


def host_form(step: StepView) -> StepView:
    """Copy the step to the host, without the rejected drafts. Waits for the device."""
    return replace(
        _on_host(step),
        kept=compacted(_on_host(step.kept)),
        sampling=None if step.sampling is None else _on_host(step.sampling),
        random=HostRandom(step.random),
        history=None if step.history is None else HostHistory(step.history),
        rejected=None if step.rejected is None else compacted_rejects(_on_host(step.rejected)),
    )


def _on_host(holder: View) -> View:
    """A copy of a view with its tensors on the host."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    tensors: dict[str, Any] = {name: value.cpu() for name, value in values.items() if isinstance(value, Tensor)}
    if values.get("hidden"):
        tensors["hidden"] = tuple([state.cpu() for state in values["hidden"]])
    return replace(holder, **tensors)


def compacted(kept: KeptTokens) -> KeptTokens:
    """The host form of kept tokens: every entry was kept. On a device it waits."""
    entries, bounds = _places(kept.token_offsets[:-1], kept.num_kept)
    hidden = tuple([state[entries] for state in kept.hidden])
    return replace(kept, token_offsets=bounds, hidden=hidden, **_columns(kept, entries))


def compacted_rejects(rejected: RejectedTokens) -> RejectedTokens:
    """The host form of rejected tokens. On a device it waits."""
    entries, bounds = _places(rejected.start, rejected.num_rejected)
    return replace(rejected, start=bounds[:-1], **_columns(rejected, entries))


def _columns(tokens: KeptTokens | RejectedTokens, entries: Tensor) -> dict[str, Any]:
    """What there is of some entries."""
    values = {field.name: getattr(tokens, field.name) for field in fields(tokens) if field.name in BY_ENTRY}
    return {name: value[entries] for name, value in values.items() if value is not None}


def _places(start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The entries `start[b] : start[b] + count[b]` of all requests, and the bounds of each among them: [n], [B+1]."""
    bounds = torch.cat([count.new_zeros(1), count.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    return start[owner] + torch.arange(len(owner), device=count.device) - bounds[owner], bounds
