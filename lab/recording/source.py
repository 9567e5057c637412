"""The engines whose output can be recorded (ours, transformers, vLLM), behind one interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.request.metrics import RequestMetrics

from ..conversation import Texts
from .manifest import Cost, Manifest


@dataclass(frozen=True)
class Ended:
    """A request that ended."""

    request_id: str
    token_ids: tuple[int, ...]  # [T] of output
    finish_reason: str  # "stop", "length" or "error"
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(frozen=True)
class Kept:
    """What the taps kept of a request."""

    probabilities: Mapping[str, Tensor]  # the fields of `RecordedRequest` that are probabilities
    hidden: Tensor | None  # [S, L*H]. None means that none were shown
    logits: Tensor | None  # [T, V]. None means that they were not asked for


class Source(Protocol):
    """Runs a target over requests, with the taps in its steps. Defaults are those of an engine that is not ours."""

    manifest: Manifest  # of the target and of who runs it; the recorder adds what is recorded
    texts: Texts
    takes_grammars: bool = False  # whether requests may ask for structured output
    measures_cost: bool = False  # whether `measure_cost` has figures: a replay is our engine's, so no other's count

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        ...

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, kept: bool = True) -> None:
        """Queue a request. Its greedy text ends after `params.max_tokens`, or by an end of sequence.

        kept: whether the taps keep what the target says. Raises SpecdecError for what cannot be served.
        """
        ...

    def step(self) -> Sequence[Ended]:
        """Advance. Returns the requests that ended."""
        ...

    def take(self, request_id: str) -> Kept:
        """What was kept of a request that ended, once."""
        ...

    def measure_cost(self, prompts: Sequence[Sequence[int]]) -> Cost:
        """Measure the cost of a step on these prompts."""
        return Cost()

    def environment(self) -> dict[str, Any]:
        """Versions and hardware."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
