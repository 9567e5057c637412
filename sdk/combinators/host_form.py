"""The host form of a step that was built for a device: for a part on the host beside one on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..types import DraftRandom, KeptRows, RejectedRows, SamplingView, StepView

View = TypeVar("View", StepView, KeptRows, RejectedRows, SamplingView)


@dataclass(frozen=True)
class HostRandom:
    """The same numbers, on the host."""

    random: DraftRandom

    def uniform(self, draft_index: int) -> Tensor:
        """[B] float64."""
        return self.random.uniform(draft_index).cpu()


def host_form(step: StepView) -> StepView:
    """Everything on the host, rejected rows taken out of the kept ones. Waits for the device."""
    on_host = _on_host(step)
    sampling = None if step.sampling is None else _on_host(step.sampling)
    rejected = None if step.rejected is None else _rejected(_on_host(step.rejected))
    kept = _compacted(_on_host(step.kept))
    return replace(on_host, kept=kept, sampling=sampling, random=HostRandom(step.random), rejected=rejected)


def _compacted(kept: KeptRows) -> KeptRows:
    chosen, bounds = _places(kept.cu_rows[:-1], kept.num_kept)
    return replace(
        kept,
        cu_rows=bounds,
        positions=kept.positions[chosen],
        token_ids=kept.token_ids[chosen],
        next_token_ids=kept.next_token_ids[chosen],
        hidden=None if kept.hidden is None else kept.hidden[chosen],
        top_ids=None if kept.top_ids is None else kept.top_ids[chosen],
        top_logprobs=None if kept.top_logprobs is None else kept.top_logprobs[chosen],
    )


def _rejected(rejected: RejectedRows) -> RejectedRows:
    chosen, bounds = _places(rejected.start, rejected.num_rejected)
    return replace(
        rejected,
        start=bounds[:-1],
        positions=rejected.positions[chosen],
        token_ids=rejected.token_ids[chosen],
        top_ids=rejected.top_ids[chosen],
        top_logprobs=rejected.top_logprobs[chosen],
    )


def _places(start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The entries `start[b] : start[b] + count[b]` of all requests, and the bounds of each among them: [n], [B+1]."""
    bounds = torch.cat([count.new_zeros(1), count.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(count)), count)
    return start[owner] + torch.arange(len(owner)) - bounds[owner], bounds


def _on_host(holder: View) -> View:
    """A copy of a view with its tensors on the host."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    tensors: dict[str, Any] = {name: value.cpu() for name, value in values.items() if isinstance(value, Tensor)}
    return replace(holder, **tensors)
