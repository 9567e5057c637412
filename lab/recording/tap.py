"""What sees an engine's steps while it is recorded: a proposer for hidden states, and a hook for logits.

Both are what any plugin could be, so that the engine does not know that it is recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specdec.core.config.sampling_params import SamplingParams
from specdec.sdk import Draft, Needs, ProposerConfig, RequestView, StepView, StrictModel, TargetInfo, hookimpl
from specdec.sdk.hooks import VerifiedRequest, VerifiedStep

from .probabilities import summarise

TAP = f"{__name__}:RecordingTap"
MOST_DRAFTS = 16


class RecordingTap:
    """Keeps the hidden states of every kept token. Drafts tokens without meaning where a step's cost is measured."""

    default_draft_tokens = MOST_DRAFTS
    api_version = "1.0"

    class Options(StrictModel):
        """Which hidden states are kept, as in `Needs`."""

        hidden_states: tuple[int | Literal["final"], ...] = ()

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The states that were asked for."""
        options = config.options or cls.Options()
        return Needs(hidden_states=options.hidden_states, whole_prompt=True, state="per_request")

    def __init__(self, config: ProposerConfig) -> None:
        self.num_drafts = 0  # of each request and step
        self._states: defaultdict[str, list[Tensor]] = defaultdict(list)

    def observe(self, step: StepView) -> None:
        """Keep the states that are new."""
        if not step.kept.hidden:
            return
        hidden, bounds = step.kept.hidden_cat(), step.kept.token_offsets.tolist()
        for request_id, first, stop in zip(step.request_ids, bounds, bounds[1:], strict=False):
            self._states[request_id].append(hidden[first:stop].clone())

    def propose(self, step: StepView) -> Draft:
        """Draft nothing, or as many tokens as a measurement of steps asks for."""
        lengths = step.budget.clamp(max=self.num_drafts)
        width = step.width
        drawn = torch.arange(width) < lengths[:, None]
        return Draft(torch.where(drawn, step.newest_token[:, None], -1), lengths)

    def on_preempt(self, request: RequestView) -> None:
        """Forget the request's states: once it resumes, every row is shown again."""
        self._states.pop(request.request_id, None)

    def take(self, request_id: str) -> Tensor | None:
        """[S, L*H] of a request that ended, once. None means that none were shown."""
        states = self._states.pop(request_id, [])
        return torch.cat(states) if states else None


@dataclass
class ProbabilityTap:
    """Keeps what the target said at every committed position of the requests that it is told of."""

    top_m: int
    full_logits: bool
    params: dict[str, SamplingParams] = field(default_factory=dict)  # of the requests that are recorded
    of_others: SamplingParams | None = None  # of requests that it was not told of. None means that they are not kept
    error: Exception | None = None  # hooks are contained: who reads the taps raises it
    _summaries: defaultdict[str, list[dict[str, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    _logits: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @hookimpl
    def on_verified(self, step: VerifiedStep) -> None:
        """Keep the rows of committed tokens."""
        try:
            for each in step.requests:
                params = self.params.get(each.request_id, self.of_others)
                if params is not None:
                    self._keep(each, step.logits[each.logits_rows], params)
        except Exception as error:
            self.error = error
            raise

    def _keep(self, each: VerifiedRequest, logits: Tensor, params: SamplingParams) -> None:
        self._summaries[each.request_id].append(summarise(logits, each.token_ids, params, self.top_m))
        if self.full_logits:
            self._logits[each.request_id].append(logits.cpu().clone())

    def take(self, request_id: str) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """The fields of `RecordedRequest` that are probabilities, and logits [T, V], once."""
        self.params.pop(request_id, None)
        parts, logits = self._summaries.pop(request_id), self._logits.pop(request_id, [])
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return joined, torch.cat(logits) if logits else None
