"""A package as it was written for contract 0.1: every element of it and nothing later. It is never adapted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import torch

from specdec.sdk import (
    DistributionKind,
    Draft,
    DraftDistribution,
    HostProposer,
    Needs,
    ProposerConfig,
    Refusal,
    RequestView,
    Services,
    StepView,
    StrictModel,
    TargetInfo,
)


class Frequent:
    """Drafts the tokens that followed the newest one most often, drawn from their frequencies."""

    api_version = "0.1"
    default_draft_tokens = 3

    class Options(StrictModel):
        most: int = 8
        report: Literal["one_hot", "sparse"] = "sparse"

    class RequestOptions(StrictModel):
        silent: bool = False

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        if config.options.most > target.vocab_size:
            raise Refusal("more than there are", f"most={target.vocab_size}")
        shared = {"hidden_states": ("final",), "history": True, "sampling": ("temperature",), "state": "shared"}
        if config.draft_sample_method == "greedy" or config.options.report == "one_hot":
            return Needs(**shared)
        return Needs(distribution="sparse", sparse_top_m=config.options.most, deterministic=False, **shared)

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config
        self.followers: dict[int, Counter[int]] = {}
        self.silent: set[str] = set()
        self.metrics = {"a field": "of the author's own"}

    def bind(self, target: TargetInfo, services: Services) -> None:
        self.device = services.device

    def warmup(self) -> None:
        assert self.device

    def on_start(self, request: RequestView) -> None:
        if request.options.silent:
            self.silent.add(request.request_id)

    def observe(self, step: StepView) -> None:
        kept = step.kept
        assert kept.hidden is not None
        order = sorted(range(len(step)), key=lambda place: step.request_ids[place])
        for place in order:
            part = slice(int(kept.cu_rows[place]), int(kept.cu_rows[place + 1]))
            pairs = zip(kept.token_ids[part].tolist(), kept.next_token_ids[part].tolist(), strict=True)
            for token, follower in pairs:
                self.followers.setdefault(token, Counter())[follower] += 1

    def propose(self, step: StepView) -> Draft:
        wants = [
            0 if request_id in self.silent else budget
            for request_id, budget in zip(step.request_ids, step.budget.tolist(), strict=True)
        ]
        tokens = [self._chain(token, want) for token, want in zip(step.newest_token.tolist(), wants, strict=True)]
        draft = Draft.from_lists(tokens, step.num_draft_tokens)
        if self.config.draft_sample_method == "greedy" or self.config.options.report == "one_hot":
            return draft
        shape = (len(step), step.num_draft_tokens, self.config.options.most)
        ids = torch.full(shape, -1)
        ids[:, :, 0] = draft.token_ids
        probs = torch.zeros(shape)
        probs[:, :, 0] = 1.0
        kind = torch.full((len(step),), int(DistributionKind.SPARSE), dtype=torch.uint8)
        return Draft(draft.token_ids, draft.lengths, DraftDistribution(kind=kind, sparse_ids=ids, sparse_probs=probs))

    def _chain(self, token: int, length: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < length and token in self.followers:
            token = self.followers[token].most_common(1)[0][0]
            drafted.append(token)
        return drafted

    def on_preempt(self, request: RequestView) -> None:
        assert request.generation >= 0

    def on_finish(self, request: RequestView) -> None:
        self.silent.discard(request.request_id)

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        torch.save({token: dict(each) for token, each in self.followers.items()}, path / "followers.pt")

    def load(self, path: Path) -> None:
        stored = torch.load(path / "followers.pt", weights_only=True)
        self.followers = {token: Counter(each) for token, each in stored.items()}

    def close(self) -> None:
        self.followers.clear()


class Meters:
    """What 0.1 had no meaning for is the author's own."""

    api_version = "0.1"

    def __init__(self, config: ProposerConfig) -> None:
        self.calls = 0

    def propose(self, step: StepView) -> Draft:
        self.calls += 1
        return Draft.from_lists([[7] * budget for budget in step.budget.tolist()], step.num_draft_tokens)

    def metrics(self, unit: str, scale: float) -> float:
        return self.calls * scale

    update_weights = "never"


class Again(HostProposer):
    """The smallest: a host proposer."""

    default_draft_tokens = 2

    def draft(self, tokens: list[int], k: int) -> list[int]:
        return tokens[-1:] * k
