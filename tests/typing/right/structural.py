"""A class without a base, checked by decorators, and one that is only called a proposer."""

from __future__ import annotations

from specdec.sdk import Draft, Needs, Proposer, ProposerConfig, RequestView, Services, StepView, TargetInfo, typed
from specdec.sdk.extensions import Metrics


@typed.proposer
@typed.bind
@typed.observe
@typed.on_finish
@typed.metrics
class RepeatLast:
    needs = Needs(extensions=(Metrics(),))

    def __init__(self, config: ProposerConfig) -> None:
        self.k = config.num_draft_tokens
        self.seen: dict[str, int] = {}

    def bind(self, target: TargetInfo, services: Services) -> None:
        self.target = target

    def observe(self, step: StepView) -> None:
        for request_id in step.request_ids:
            self.seen[request_id] = self.seen.get(request_id, 0) + 1

    def on_finish(self, request: RequestView) -> None:
        del self.seen[request.request_id]

    def metrics(self) -> dict[str, float]:
        return {"requests": float(len(self.seen))}

    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None].expand(-1, step.width), step.budget)


observes: type[typed.SupportsObserve] = RepeatLast
offered: list[type[Proposer]] = [RepeatLast]
k: int = RepeatLast(ProposerConfig(num_draft_tokens=3)).k
