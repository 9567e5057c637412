"""Made-up steps of every kind that compiled code tells apart: of one request or more, of one token each or more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..needs import Needs
from ..types import KeptTokens, Phase, RequestView, SamplingView, StepView, TargetInfo

MORE, ONE = 2, 1
"""Of requests, and of tokens that each committed. More come first: one of anything is compiled on its own."""


@dataclass(frozen=True)
class WarmUp:
    """Steps in which requests in the first rows committed their first tokens."""

    needs: Needs
    target: TargetInfo
    width: int  # of drafts
    dtype: torch.dtype  # of hidden states

    def steps(self) -> Iterator[StepView]:
        """Yield steps to observe. On a device each comes twice, since a pass over it may be padded or not."""
        for num_requests, width in product((MORE, ONE), repeat=2):
            if num_requests <= self.target.max_num_seqs:
                step = self._step(num_requests, width)
                yield step
                if self._device.type != "cpu":
                    yield replace(step, kept=replace(step.kept, most_tokens=width))

    def budgets(self, step: StepView) -> Iterator[StepView]:
        """Yield steps to draft for: every budget while all are greedy, then sampled if the proposer reads that."""
        for budget in range(step.width, 0, -1):
            yield replace(step, budget=torch.full_like(step.budget, budget))
        if step.sampling is not None:
            yield replace(step, sampling=self._sampling(len(step), temperature=1.0))

    def _step(self, num_requests: int, width: int) -> StepView:
        each = partial(torch.full, (num_requests,), device=self._device)
        return StepView(
            requests=tuple([_request(slot) for slot in range(num_requests)]),
            width=self.width,
            slots=torch.arange(num_requests, device=self._device),
            generation=each(0),
            phase=each(int(Phase.PREFILL_DONE)),
            committed_length=each(width + 1),
            newest_token=each(0),
            num_drafted=each(0),
            num_accepted=each(0),
            budget=each(self.width),
            kept=self._kept(num_requests, width),
            random=_Halves(num_requests, self._device),
            sampling=self._sampling(num_requests, temperature=0.0) if self.needs.sampling else None,
            history=_Zeros(num_requests, width + 1, self._device) if self.needs.history else None,
            dummy=True,
        )

    def _kept(self, num_requests: int, width: int) -> KeptTokens:
        total = num_requests * width
        zeros = partial(torch.zeros, device=self._device)
        token_ids = zeros(total, dtype=torch.int64)
        hidden = [zeros(total, self.target.hidden_size, dtype=self.dtype) for _ in self.needs.hidden_states]
        return KeptTokens(
            token_offsets=torch.arange(num_requests + 1, device=self._device) * width,
            num_kept=torch.full((num_requests,), width, device=self._device),
            kept_start=zeros(num_requests, dtype=torch.int64),
            positions=torch.arange(width, device=self._device).repeat(num_requests),
            token_ids=token_ids,
            next_token_ids=token_ids,
            hidden=tuple(hidden),
        )

    def _sampling(self, num_requests: int, *, temperature: float) -> SamplingView:
        values = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        columns = {name: torch.full((num_requests,), values[name], device=self._device) for name in self.needs.sampling}
        return SamplingView(**columns, all_greedy=temperature == 0)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu" if self.needs.placement == "host" else self.target.device)


def _request(slot: int) -> RequestView[Any]:
    return RequestView(request_id=f"warm-up {slot}", slot=slot, generation=0, prompt_token_ids=(0,))


@dataclass(frozen=True)
class _Zeros:
    """A history of tokens 0."""

    num_requests: int
    length: int
    device: torch.device

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        return [0] * (self.length - start)

    def of(self, request: int, start: int = 0) -> Tensor:
        return torch.zeros(self.length - start, dtype=torch.int64, device=self.device)

    def tail(self, num_tokens: int) -> Tensor:
        return torch.zeros(self.num_requests, num_tokens, dtype=torch.int64, device=self.device)


@dataclass(frozen=True)
class _Halves:
    """A draft stream without chance."""

    num_requests: int
    device: torch.device

    def uniform(self, draft_index: int) -> Tensor:
        """[B] float64."""
        return torch.full((self.num_requests,), 0.5, dtype=torch.float64, device=self.device)
