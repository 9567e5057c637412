"""The assistant: layers without keys of their own, between the target's embeddings and a small head.

Letters: b requests, H hidden size of the target, h of the assistant, V vocabulary, C clusters of V / C tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import AssistantSpec, OrderedHead


class Assistant(nn.Module):
    """Maps a token and a state of the target's width to logits and the next state."""

    def __init__(self, spec: AssistantSpec, decoder: Any) -> None:
        """decoder: transformers' layers for `spec.decoder`."""
        super().__init__()
        decoder.embed_tokens = nn.Identity()  # inputs are states
        self.model = decoder
        self.pre_projection = nn.Linear(2 * spec.width, spec.hidden_size, bias=False)
        self.post_projection = nn.Linear(spec.hidden_size, spec.width, bias=False)
        self.lm_head: nn.Module = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.ordered is not None:
            self.lm_head = ClusteredHead(spec.hidden_size, spec.vocab_size, spec.ordered)
        self._softcap = spec.softcap
        self._head_dims = {each.self_attn.layer_type: each.self_attn.head_dim for each in decoder.layers}

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Logits [b, V] and states [b, H], of the target's embeddings and states [b, H].

        positions: of the rotary embedding, [b]. attention: over the target's keys and values.
        """
        dtype = next(self.model.norm.parameters()).dtype
        states = self.pre_projection(torch.cat([embedded, hidden], dim=-1).to(dtype))[None]
        nothing = {kind: (states.new_empty(1, 1, 0, dim),) * 2 for kind, dim in self._head_dims.items()}
        output = self.model(
            inputs_embeds=states,
            attention_mask=dict.fromkeys(self._head_dims),
            position_ids=positions[None],
            shared_kv_states=nothing,  # in their place attention reads the target's
            use_cache=False,
            **attention,
        ).last_hidden_state[0]
        logits: Tensor = self.lm_head(output)
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits, self.post_projection(output)


class ClusteredHead(nn.Module):
    """Logits of the tokens in the best clusters only; the others are -inf.

    transformers gives the others the lowest logit less one, and vLLM the lowest number. The most likely token is the
    same.
    """

    def __init__(self, hidden_size: int, vocab_size: int, ordered: OrderedHead) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.centroids = nn.Linear(hidden_size, ordered.num_centroids, bias=False)
        self.token_ordering = nn.Buffer(torch.empty(vocab_size, dtype=torch.int64))  # token ids, cluster by cluster
        self._shape = ordered.num_centroids, vocab_size // ordered.num_centroids
        self._top_k = ordered.top_k

    def forward(self, states: Tensor) -> Tensor:
        """[b, V] for [b, h]."""
        best = self.centroids(states).topk(self._top_k, dim=-1).indices
        ids = self.token_ordering.view(self._shape)[best].flatten(1)  # [b, top_k * V / C]
        found = torch.einsum("bh,bnh->bn", states, self.weight[ids])
        return found.new_full((len(states), len(self.weight)), -torch.inf).scatter(1, ids, found)
