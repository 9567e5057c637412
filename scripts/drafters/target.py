"""The frozen target: what its drafters read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Observation:
    """One forward of the target over [B, T] tokens."""

    residuals: tuple[Tensor, ...]  # N of [B, T, H]: the residual stream after 0, 1, .. N - 1 layers
    final: Tensor  # [B, T, H], after the final norm: what the language-model head reads

    def features(self, boundaries: tuple[int, ...]) -> Tensor:
        """The residual streams after the given numbers of layers, side by side: [B, T, A * H]."""
        return torch.cat([self.residuals[boundary] for boundary in boundaries], dim=-1)


class FrozenTarget:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        self.model.requires_grad_(False)

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        return self.model.get_input_embeddings().weight

    @property
    def unembedding(self) -> Tensor:
        """[V, H], the weight of the language-model head."""
        return self.model.get_output_embeddings().weight

    @torch.no_grad()
    def observe(self, ids: Tensor) -> Observation:
        output = self.model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        # transformers' last hidden state is the one after the final norm, so it is no residual stream
        return Observation(tuple(output.hidden_states[:-1]), output.last_hidden_state)

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """[..., H] -> [..., V]"""
        return final @ self.unembedding.T

    def continue_greedily(self, ids: Tensor, num_tokens: int) -> Tensor:
        return continue_greedily(self.model, ids, num_tokens)


@torch.no_grad()
def continue_greedily(model: PreTrainedModel, ids: Tensor, num_tokens: int) -> Tensor:
    """The `num_tokens` likeliest tokens after `ids` [B, T], one by one: [B, num_tokens]."""
    chosen: list[Tensor] = []
    cache, new = None, ids
    for _ in range(num_tokens):
        output = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, new = output.past_key_values, output.logits.argmax(-1)
        chosen.append(new)
    return torch.cat(chosen, dim=1)
