"""What a proposer takes from the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sdk import Draft, Needs, ProposerBase, Services, StepView, TargetInfo
from specdec.sdk.extensions import Graphs


class OneMore(ProposerBase):
    needs = Needs(hidden_states=("final",), sampling=("temperature", "top_p"), extensions=(Graphs(),))

    def bind(self, target: TargetInfo, services: Services) -> None:
        self._embed = services.embed
        self._head = services.lm_head
        self._scale: float = services.logit_scale
        self._vocab: int = target.vocab_size
        self._table: Tensor = services.load_tensors(target.checkpoint_dir or ".", ("model.embed_tokens",))["weight"]
        self._dtype: torch.dtype = services.dtype
        self._device: torch.device = services.device
        self._run = services.compile(self.logits)

    def warmup(self) -> None:
        self._run(torch.zeros(1, 8, dtype=self._dtype, device=self._device))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden) * self._scale

    def propose(self, step: StepView) -> Draft:
        kept = step.kept
        if step.dummy or step.sampling is None or step.sampling.temperature is None:
            return Draft.from_lists([[] for _ in range(len(step))], step.width)
        best = self.logits(kept.hidden_cat(kept.last)).argmax(dim=-1)
        tokens = torch.full((len(step), step.width), -1, dtype=torch.int64)
        tokens[:, 0] = best
        return Draft(tokens, step.budget.clamp(max=1))
