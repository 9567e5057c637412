"""Hooks of every kind that observes, and a proposer that a hook registers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from specdec.sdk import Draft, ProposerConfig, Registry, RequestView, StepView, hookimpl
from specdec.sdk.hooks import StepStats, VerifiedStep

counts: Counter[str] = Counter()


class Repeat:
    """The newest token once more, with no base and no version."""

    def __init__(self, config: ProposerConfig[Any]) -> None:
        self.config = config

    def propose(self, step: StepView) -> Draft:
        budgets = zip(step.newest_token.tolist(), step.budget.tolist(), strict=True)
        return Draft.from_lists([[newest] * budget for newest, budget in budgets], step.width)


@hookimpl
def register_proposers(registry: Registry) -> None:
    registry.add("frozen_registered", "frozen_hooks:Repeat")


@hookimpl
def on_request_start(request: RequestView[Any]) -> None:
    counts["prompt tokens"] += len(request.prompt_token_ids)


@hookimpl
def on_step(stats: StepStats) -> None:
    counts["steps"] += 1
    counts["drafted"] += stats.num_draft_tokens
    counts["accepted"] += stats.num_accepted_tokens


@hookimpl
def on_verified(step: VerifiedStep) -> None:
    counts["verified"] += len(step.requests)


@hookimpl
def on_request_finished(request: RequestView[Any], metrics: Mapping[str, Any]) -> None:
    counts["finished"] += metrics["mean_acceptance_length"] >= 1
