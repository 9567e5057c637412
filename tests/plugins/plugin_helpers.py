"""What tests of model-based proposers share: what the engine really drafted, and what the target really computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import specdec
from specdec import LLM, SamplingParams

TINY = Path(specdec.__file__).parent / "assets" / "tiny"
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@dataclass(frozen=True)
class Drafted:
    """One verification: the tokens that were committed before it, the draft, and how much of it was accepted."""

    committed: list[int]  # prompt and output; the newest has no KV yet
    draft: list[int]
    num_accepted: int


def drafted_by_engine(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[Drafted]:
    """Every draft that the engine verified while it served one prompt, in order."""
    committed, seen = list(prompt), []
    for update in llm.stream([{"prompt_token_ids": list(prompt)}], params):
        if update.draft_token_ids:
            seen.append(Drafted(list(committed), list(update.draft_token_ids), update.num_accepted))
        committed += update.token_ids
    return seen


class TargetStates:
    """The target's own hidden states, from transformers with hooks: nothing of the engine is involved."""

    def __init__(self, path: str | Path = TINY / "target") -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.layers = self.model.model.layers

    @torch.no_grad()
    def of(self, token_ids: Sequence[int]) -> dict[int | str, Tensor]:
        """Boundaries 0 .. num_layers (before the final norm) and "final" (after it), each [T, H]."""
        kept: dict[int | str, Tensor] = {}
        handles = [
            layer.register_forward_pre_hook(lambda _, args, k=index: kept.__setitem__(k, args[0][0]))
            for index, layer in enumerate(self.layers)
        ]
        norm = self.model.model.norm
        handles.append(norm.register_forward_pre_hook(lambda _, args: kept.__setitem__(len(self.layers), args[0][0])))
        handles.append(norm.register_forward_hook(lambda _, args, out: kept.__setitem__("final", out[0])))
        try:
            self.model(torch.tensor([list(token_ids)]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return kept

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        return self.model.get_output_embeddings().weight
