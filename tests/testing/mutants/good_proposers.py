"""Proposers that keep the contract: what the mutants are made from, each by one mistake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from pydantic import Field, computed_field
from torch import Tensor

from specdec.sdk import (
    DistributionKind,
    Draft,
    DraftDistribution,
    Needs,
    ProposerConfig,
    RequestView,
    Services,
    StepView,
    StrictModel,
    TargetInfo,
)
from specdec.sdk.extensions import DraftKV


class Followers:
    """Drafts what followed each token when it last occurred. Host, history, one dict per request."""

    needs = Needs(history=True, state="per_request")

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config
        self.tokens: dict[str, list[int]] = {}

    def bind(self, target: TargetInfo, services: Services) -> None:
        self.target, self.services = target, services

    def on_start(self, request: RequestView) -> None:
        self.tokens[request.request_id] = []

    def observe(self, step: StepView) -> None:
        for b, (row, length) in enumerate(zip(step.slots.tolist(), step.committed_length.tolist(), strict=True)):
            self.learn(step, b, row, length)

    def learn(self, step: StepView, b: int, row: int, length: int) -> None:
        tokens = self.tokens[step.request_ids[b]]
        tokens.extend(step.history.token_ids(b, len(tokens)))

    def propose(self, step: StepView) -> Draft:
        drafts = [self.draft(step, b, budget) for b, budget in enumerate(step.budget.tolist())]
        return Draft.from_lists(drafts, step.width)

    def draft(self, step: StepView, b: int, budget: int) -> list[int]:
        return follow(self.tokens[step.request_ids[b]], budget)

    def on_finish(self, request: RequestView) -> None:
        del self.tokens[request.request_id]


def follow(tokens: Sequence[int], count: int) -> list[int]:
    """A walk along `followers`; a token that was never followed is followed by the number of tokens."""
    followers = dict(pairwise(tokens))
    draft: list[int] = []
    for _ in range(count):
        draft.append(followers.get((draft or tokens)[-1], len(tokens)))
    return draft


class SharedFollowers(Followers):
    """Drafts what followed each token when anybody last wrote it: learns from the text of all, in the order of ids."""

    needs = Needs(history=True, state="shared")

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.followers: dict[str, dict[int, int]] = {}  # by namespace
        self.namespaces: dict[str, str] = {}

    def on_start(self, request: RequestView) -> None:
        super().on_start(request)
        self.namespaces[request.request_id] = request.namespace

    def on_finish(self, request: RequestView) -> None:
        super().on_finish(request)
        del self.namespaces[request.request_id]

    def shared(self, request_id: str) -> dict[int, int]:
        return self.followers.setdefault(self.namespaces[request_id], {})

    def observe(self, step: StepView) -> None:
        rows, lengths = step.slots.tolist(), step.committed_length.tolist()
        for b in self.places(step):
            self.learn(step, b, rows[b], lengths[b])

    def places(self, step: StepView) -> list[int]:
        return sorted(range(len(step)), key=step.request_ids.__getitem__)

    def learn(self, step: StepView, b: int, row: int, length: int) -> None:
        known = len(self.tokens[step.request_ids[b]])  # a replay shows nothing that is new
        super().learn(step, b, row, length)
        request_id = step.request_ids[b]
        self.shared(request_id).update(pairwise(self.tokens[request_id][max(known - 1, 0) :]))

    def draft(self, step: StepView, b: int, budget: int) -> list[int]:
        draft, followers = [int(step.newest_token[b])], self.shared(step.request_ids[b])
        while len(draft) <= budget and draft[-1] in followers:
            draft.append(followers[draft[-1]])
        return draft[1:]


class Waves:
    """Draws from a distribution that depends on the token before, and reports it as dense logits. No state, no
    weights.
    """

    needs = Needs(distributions=("dense",), sampling=("temperature",))

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config

    def bind(self, target: TargetInfo, services: Services) -> None:
        self.vocab_size = target.vocab_size

    def logits(self, before: Tensor, temperature: Tensor) -> Tensor:
        """[B, V] for the tokens before [B]."""
        ids = torch.arange(self.vocab_size)
        scaled = 4 * torch.sin(before[:, None] * 1.7 + ids * (0.3 + before[:, None] % 3))
        return scaled.float() / temperature[:, None]

    def propose(self, step: StepView) -> Draft:
        greedy = step.sampling.temperature == 0
        temperature = step.sampling.temperature.masked_fill(greedy, 1.0)
        before, ids, distributions = step.newest_token, [], []
        for index in range(step.width):
            logits = self.logits(before, temperature)
            before = torch.where(greedy, logits.argmax(-1), self.draw(step, index, logits))
            ids.append(before)
            distributions.append(self.reported(logits, before))
        kind = torch.where(greedy, int(DistributionKind.ONE_HOT), int(DistributionKind.DENSE_LOGITS)).to(torch.uint8)
        token_ids, distribution = torch.stack(ids, 1), torch.stack(distributions, 1)
        return Draft(
            token_ids,
            self.lengths(step, token_ids, distribution),
            distribution=DraftDistribution(kind=kind, logits=distribution),
        )

    def draw(self, step: StepView, index: int, logits: Tensor) -> Tensor:
        return inverse_cdf(logits.softmax(-1), step.random.uniform(index))

    def reported(self, logits: Tensor, drawn: Tensor) -> Tensor:
        return logits

    def lengths(self, step: StepView, token_ids: Tensor, distribution: Tensor) -> Tensor:
        return step.budget


class WavesInABuffer(Waves):
    """Reports its logits in memory that it uses again."""

    def bind(self, target: TargetInfo, services: Services) -> None:
        super().bind(target, services)
        self.buffer = torch.empty(0)

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        if len(self.buffer) < draft.distribution.logits.numel():
            self.buffer = draft.distribution.logits.new_empty(draft.distribution.logits.numel())
        logits = self.buffer[: draft.distribution.logits.numel()].view_as(draft.distribution.logits)
        logits.copy_(draft.distribution.logits)
        return replace(draft, distribution=replace(draft.distribution, logits=logits))


class WavesSeldom(Waves):
    """Drafts behind a token that the kit's texts do not have, and reads only there what it declares."""

    def propose(self, step: StepView) -> Draft:
        if bool((step.newest_token == 1000).any()):
            return super().propose(step)
        return Draft.from_lists([[]] * len(step), step.width)


class WavesWithNoise(Waves):
    """Draws from distributions that differ each time, as often as chance has it, and reports them."""

    needs = Waves.needs.replace(deterministic=False)

    def logits(self, before: Tensor, temperature: Tensor) -> Tensor:
        logits = super().logits(before, temperature)
        return logits + torch.rand(logits.shape)

    def lengths(self, step: StepView, token_ids: Tensor, distribution: Tensor) -> Tensor:
        return (step.budget * torch.rand(len(step))).ceil().long()


class LearnsByGradient(Followers):
    """Trains a layer on the target's states, and drafts without it."""

    needs = Needs(history=True, hidden_states=("final",), state="per_request")

    def bind(self, target: TargetInfo, services: Services) -> None:
        super().bind(target, services)
        self.layer = torch.nn.Linear(target.hidden_size, 1)

    def observe(self, step: StepView) -> None:
        super().observe(step)
        with torch.inference_mode(False), torch.enable_grad():
            self.layer(step.kept.hidden[0].clone()).pow(2).sum().backward()


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """[B] for probs [B, V] and numbers [B]."""
    cumulated = probs.double().cumsum(-1)
    return (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(-1).clamp(max=probs.shape[1] - 1)


class HiddenMean:
    """Keeps the target's hidden states in draft KV of its own, and drafts the token that their mean points to."""

    WIDTH = 8

    class Options(StrictModel):
        offset: int = 0

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return Needs(hidden_states=(2, "final"), extensions=(DraftKV(num_layers=1, num_heads=1, head_dim=cls.WIDTH),))

    def __init__(self, config: ProposerConfig) -> None:
        self.offset = config.options.offset

    def bind(self, target: TargetInfo, services: Services) -> None:
        self.target, self.services = target, services
        generator = torch.Generator().manual_seed(5)
        self.directions = torch.randn(self.WIDTH, target.vocab_size, generator=generator)

    def observe(self, step: StepView) -> None:
        kept, store = step.kept, self.services.draft_kv()
        owner = torch.repeat_interleave(step.slots, kept.num_kept)
        keys = kept.hidden[0][:, None, : self.WIDTH] + kept.next_token_ids[:, None, None] % 7
        store.write(0, owner, kept.positions, keys, keys)

    def propose(self, step: StepView) -> Draft:
        drafts = []
        for row, length, budget in zip(
            step.slots.tolist(), step.committed_length.tolist(), step.budget.tolist(), strict=True
        ):
            keys, _ = self.services.draft_kv().read(0, row, length - 1) if budget else (torch.zeros(1, 1, 8), None)
            best = int((keys[:, 0].double().mean(0).float() @ self.directions).argmax())
            drafts.append([(best + self.offset + i) % self.target.vocab_size for i in range(budget)])
        return Draft.from_lists(drafts, step.width)


class HasAThread(Followers):
    """Has a thread from `bind` to `close`."""

    needs = Needs(history=True, state="shared")

    def bind(self, target: TargetInfo, services: Services) -> None:
        super().bind(target, services)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.over.wait, name="from bind to close")
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.thread.join()


class Logs(Followers):
    """Has its logger as an attribute, and writes of each request. Under pytest a logger leads to all that it wrote."""

    def bind(self, target: TargetInfo, services: Services) -> None:
        super().bind(target, services)
        self.logger = logging.getLogger("an author's")

    def on_start(self, request: RequestView) -> None:
        super().on_start(request)
        self.logger.warning("%s started", request.request_id)


class FewerWhereSampled(Followers):
    """Drafts one token of a request that is sampled. It looks for one only where there may be one."""

    needs = Needs(history=True, sampling=("temperature",), state="per_request")

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        if step.sampling.all_greedy:
            return draft
        sampled = step.sampling.temperature > 0
        return replace(draft, lengths=torch.where(sampled, draft.lengths.clamp(max=1), draft.lengths))


class HasAKeyThatIsNoName(Followers):
    """Its users write "max-drafts"."""

    class Options(StrictModel):
        most: int = Field(default=2, alias="max-drafts")

        @computed_field
        @property
        def twice(self) -> int:
            return 2 * self.most


class RepeatsAtLength:
    """Drafts the newest token, as often as there is a budget."""

    def __init__(self, config: ProposerConfig) -> None:
        pass

    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None].repeat(1, step.width), step.budget)
