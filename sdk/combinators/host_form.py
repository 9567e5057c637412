"""The host form of a step that was built for a device: for a part on the host beside one on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..types import DraftRandom, KeptRows, SamplingView, StepView

View = TypeVar("View", StepView, KeptRows, SamplingView)


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
    return replace(on_host, kept=_compacted(_on_host(step.kept)), sampling=sampling, random=HostRandom(step.random))


def _compacted(kept: KeptRows) -> KeptRows:
    widths = kept.cu_rows.diff()
    owner = torch.repeat_interleave(torch.arange(len(widths)), widths)
    rank = torch.arange(len(owner)) - kept.cu_rows[owner]
    chosen = (rank < kept.num_kept[owner]).nonzero()[:, 0]
    return replace(
        kept,
        cu_rows=torch.cat([kept.num_kept.new_zeros(1), kept.num_kept.cumsum(0)]),
        positions=kept.positions[chosen],
        token_ids=kept.token_ids[chosen],
        next_token_ids=kept.next_token_ids[chosen],
        hidden=None if kept.hidden is None else kept.hidden[chosen],
    )


def _on_host(holder: View) -> View:
    """A copy of a view with its tensors on the host."""
    values = {field.name: getattr(holder, field.name) for field in fields(holder)}
    tensors: dict[str, Any] = {name: value.cpu() for name, value in values.items() if isinstance(value, Tensor)}
    return replace(holder, **tensors)
