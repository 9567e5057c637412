"""Hooks: proposers that are offered, and a listener."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.sdk import ProposerError, Registry, RequestView, hookimpl
from specdec.sdk.hooks import StepStats, VerifiedStep


@hookimpl
def register_proposers(registry: Registry) -> None:
    registry.add("last", "mine.proposer:Last")


class Listener:
    def __init__(self) -> None:
        self.accepted: dict[str, int] = {}
        self.num_steps = 0

    @hookimpl
    def on_step(self, stats: StepStats) -> None:
        self.num_steps += stats.num_drafts

    @hookimpl
    def on_verified(self, step: VerifiedStep) -> None:
        for request in step.requests:
            self.accepted[request.request_id] = request.num_accepted + step.logits.shape[0]

    @hookimpl
    def on_request_finished(self, request: RequestView, metrics: Mapping[str, Any]) -> None:
        if request.end is not None:
            self.accepted[request.request_id] = request.end.num_accepted

    @hookimpl
    def on_proposer_error(self, error: ProposerError) -> None:
        print(error.code, error.summary, error.facts)
