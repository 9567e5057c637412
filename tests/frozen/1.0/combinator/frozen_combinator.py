"""A careful look-up, and behind it one that always has an idea."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.sdk import Draft, HostProposer, Needs, ProposerConfig, RequestView, StepView
from specdec.sdk.combinators import Chain


class Careful(HostProposer):
    """What followed the last two tokens."""

    api_version = "1.0"

    def draft(self, request: RequestView[Any], tokens: Sequence[int], k: int) -> list[int]:
        for i in range(len(tokens) - 3, -1, -1):
            if tokens[i] == tokens[-2] and tokens[i + 1] == tokens[-1]:
                return list(tokens[i + 2 : i + 2 + k])
        return []


class Sure:
    """The newest token once more. It states no version and has no base."""

    needs = Needs()

    def __init__(self, config: ProposerConfig[Any]) -> None:
        self.seen: set[str] = set()

    def observe(self, step: StepView) -> None:
        self.seen.update(step.request_ids)

    def on_finish(self, request: RequestView[Any]) -> None:
        self.seen.discard(request.request_id)

    def propose(self, step: StepView) -> Draft:
        tokens = step.newest_token[:, None].expand(-1, step.width)
        kept = torch.arange(step.width) < step.budget[:, None]
        return Draft(tokens.where(kept, -1), step.budget)


class Both(Chain):
    api_version = "1.0"
    parts = (Careful, Sure)
