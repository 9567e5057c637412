"""The host form of a step that was built for a device: for a part on the host beside one on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from torch import Tensor

from ..compaction import compacted, compacted_rejects
from ..extensions import RejectedTokens
from ..types import DraftRandom, KeptTokens, SamplingView, StepView, TokenHistory

View = TypeVar("View", StepView, KeptTokens, RejectedTokens, SamplingView)


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
