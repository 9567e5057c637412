"""A head with one attention layer: it keeps draft KV and reads it back. Nobody has trained it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.sdk import (
    DistributionKind,
    Draft,
    DraftDistribution,
    Needs,
    ProposerBase,
    ProposerConfig,
    Refusal,
    RequestView,
    Services,
    StepView,
    TargetInfo,
)
from specdec.sdk.extensions import DraftKV

DIM = 16


class Head(ProposerBase):
    api_version = "1.0"
    default_draft_tokens = 3

    @classmethod
    def needs(cls, config: ProposerConfig[Any], target: TargetInfo) -> Needs:
        if "draft_kv@1" not in target.extensions:
            raise Refusal("the engine keeps no draft KV", "another engine")
        kv = DraftKV(num_layers=1, num_heads=1, head_dim=DIM, lookahead=max(config.num_draft_tokens - 1, 1))
        drawn = config.draft_sample_method == "probabilistic"
        return Needs(
            hidden_states=("final",),
            sampling=("temperature",) if drawn else (),
            distributions=("dense",) if drawn else (),
            state="per_request",
            whole_prompt=True,
            extensions=(kv,),
        )

    def bind(self, target: TargetInfo, services: Services) -> None:
        self.services = services
        self.store = services.draft_kv()
        self.vocab_size = target.vocab_size
        generator = torch.Generator().manual_seed(1)
        width = target.hidden_size
        self.query, self.key, self.value = (torch.randn(width, DIM, generator=generator) / width for _ in range(3))
        self.out = torch.randn(DIM, width, generator=generator) / width
        self.last: dict[str, Tensor] = {}  # request id -> hidden state of its last kept token [H]

    def observe(self, step: StepView) -> None:
        kept = step.kept
        for place, request in enumerate(step.requests):
            first = int(kept.token_offsets[place])
            entries = slice(first, first + int(kept.num_kept[place]))
            hidden = kept.hidden[0][entries].float()
            self.keep(request.slot, kept.positions[entries], hidden)
            self.last[request.request_id] = hidden[-1]

    def propose(self, step: StepView) -> Draft:
        drafts: list[list[int]] = []
        drawn = self.config.draft_sample_method == "probabilistic"
        probs = torch.zeros(len(step), step.width, self.vocab_size if drawn else 0)
        temperatures = (
            step.sampling.temperature.tolist() if step.sampling and step.sampling.temperature is not None else []
        )
        for place, request in enumerate(step.requests):
            temperature = temperatures[place] if temperatures else 0.0
            drafts.append(self.draft(step, place, request, temperature, probs[place]))
        draft = Draft.from_lists(drafts, step.width)
        if not drawn:
            return draft
        kinds = [DistributionKind.DENSE_PROBS if each else DistributionKind.ONE_HOT for each in temperatures]
        kind = torch.tensor(kinds, dtype=torch.uint8)
        return Draft(draft.token_ids, draft.lengths, distribution=DraftDistribution(kind=kind, probs=probs))

    def draft(
        self, step: StepView, place: int, request: RequestView[Any], temperature: float, probs: Tensor
    ) -> list[int]:
        budget, token = int(step.budget[place]), int(step.newest_token[place])
        position = int(step.committed_length[place]) - 1
        hidden, tokens = self.last[request.request_id], []
        for index in range(budget):
            keys, values = self.store.read(0, request.slot, position)
            state = hidden + self.services.embed(torch.tensor([token]))[0].float()
            weights = (keys[:, 0].float() @ (state @ self.query)).softmax(0)
            hidden = state + (weights @ values[:, 0].float()) @ self.out
            logits = self.services.lm_head(hidden[None])[0].float()
            if temperature:
                probs[index] = (logits / temperature).softmax(0)
                uniform = float(step.random.uniform(index)[place])
                token = min(int((probs[index].double().cumsum(0) < uniform).sum()), self.vocab_size - 1)
            else:
                token = int(logits.argmax())
            tokens.append(token)
            if len(tokens) < budget:
                self.keep(request.slot, torch.tensor([position]), hidden[None])
                position += 1
        return tokens

    def keep(self, slot: int, positions: Tensor, hidden: Tensor) -> None:
        keys, values = ((hidden @ each)[:, None] for each in (self.key, self.value))
        self.store.write(0, torch.full_like(positions, slot), positions, keys, values)

    def on_finish(self, request: RequestView[Any]) -> None:
        self.last.pop(request.request_id, None)
