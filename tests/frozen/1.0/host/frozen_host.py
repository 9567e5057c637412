"""What followed the last occurrence of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from specdec.sdk import HostProposer, Needs, ProposerConfig, RequestView, StrictModel
from specdec.sdk.extensions import Metrics


class Lookup(HostProposer):
    api_version = "1.0"
    needs = Needs(history=True, state="per_request", extensions=(Metrics(),))

    class Options(StrictModel):
        longest: int = Field(default=3, ge=1)

    class RequestOptions(StrictModel):
        most: int = 8

    def __init__(self, config: ProposerConfig[Any]) -> None:
        super().__init__(config)
        self.num_found = 0

    def draft(self, request: RequestView[Any], tokens: Sequence[int], k: int) -> list[int]:
        longest = self.config.options.longest
        for length in range(min(longest, len(tokens) - 1), 0, -1):
            suffix = list(tokens[len(tokens) - length :])
            for start in range(len(tokens) - length - 1, -1, -1):
                if list(tokens[start : start + length]) == suffix:
                    self.num_found += 1
                    return list(tokens[start + length : start + length + k])[: request.options.most]
        return []

    def metrics(self) -> dict[str, float]:
        return {"found": float(self.num_found)}
