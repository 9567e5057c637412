"""A proposer in plain Python, with options of its own and options of a request."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from specdec.sdk import HostProposer, Needs, ProposerConfig, RequestView, StrictModel, TargetInfo


class Lookup(HostProposer):
    api_version = "1.0"
    default_draft_tokens = 5

    class Options(StrictModel):
        match_length: int = Field(default=2, ge=1)
        stop_at: int | None = None

    class RequestOptions(StrictModel):
        reference: tuple[int, ...] = ()

    config: ProposerConfig[Options]

    def draft(self, request: RequestView[RequestOptions], tokens: Sequence[int], k: int) -> Sequence[int]:
        text = [*request.options.reference, *tokens]
        length = self.config.options.match_length
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                return text[start + length : start + length + k]
        return []


class Longer(Lookup):
    """Below another proposer, with a constructor, computed needs and other names of the arguments."""

    def __init__(self, config: ProposerConfig[Lookup.Options]) -> None:
        super().__init__(config)
        self.lengths: list[int] = [config.options.match_length]

    @classmethod
    def needs(cls, config: ProposerConfig[Lookup.Options], target: TargetInfo) -> Needs:
        return Needs(history=True, max_draft_tokens=config.options.stop_at)

    def on_start(self, started: RequestView[Lookup.RequestOptions]) -> None:
        self.lengths.append(len(started.options.reference))

    def on_finish(self, ended: RequestView[Lookup.RequestOptions]) -> None:
        super().on_finish(ended)
        self.lengths.pop()


class Stated(HostProposer):
    needs = Needs(history=True, whole_prompt=True)

    def draft(self, request: RequestView, tokens: Sequence[int], k: int) -> list[int]:
        return [tokens[-1]] * k


config = ProposerConfig(num_draft_tokens=3, options=Lookup.Options(match_length=3))
proposer = Lookup(config)
other = Longer(config.replace(num_draft_tokens=2))
needs = Needs(history=True, placement="device", sampling=("temperature",))
