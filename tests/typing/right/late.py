"""A proposer that asks a service, with options of its own beside the base's."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.sdk import LateProposer, ProposerConfig, RequestView, StrictModel
from specdec.sdk.late_proposer import LateOptions


class Remote(LateProposer):
    api_version = "1.0"

    class Options(LateOptions):
        url: str = "http://127.0.0.1:8000"

    class RequestOptions(StrictModel):
        corpus: str = "all"

    config: ProposerConfig[Options]

    def ask(self, question: RequestView[RequestOptions], token_ids: Sequence[int], most: int) -> list[int]:
        where = f"{self.config.options.url}/{question.options.corpus}"
        return [*token_ids[: min(most, len(where))]]


deadline: float | None = Remote(
    ProposerConfig(num_draft_tokens=3, options=Remote.Options(deadline_ms=5))
).config.options.deadline_ms
