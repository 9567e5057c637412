"""Drafters that draft token by token on the target's features: EAGLE-1, EAGLE-3 and MTP share their rows.

Row p pairs the token at position p + 1 with the state of position p and predicts the token at p + 2. The state is
made of the target's features where the target has run, and is the drafter's own previous output where not.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from .layers import CausalMemory, Memory, per_query_head
from .target import Observation


class RowDrafter(Protocol):
    def features(self, observation: Observation) -> Tensor:
        """What this drafter reads of the target, [B, T, *]."""
        ...

    def first_states(self, features: Tensor) -> Tensor:
        """The states of rows the target has run, [B, R, h]."""
        ...

    def __call__(self, tokens: Tensor, states: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Logits [B, R, D] and next states [B, R, h] of rows of `tokens` [B, R], `states` [B, R, h]."""
        ...

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of the drafter's own ones."""
        ...


@torch.no_grad()
def draft_token_by_token(head: RowDrafter, features: Tensor, tokens: Tensor, num_tokens: int) -> Tensor:
    """Greedy drafts [B, num_tokens] after `tokens` [B, n] = x_1 .. x_n, given features [B, n, *] of x_0 .. x_{n-1}."""
    memory = CausalMemory()
    num_rows = tokens.shape[1]
    states, positions = head.first_states(features), torch.arange(num_rows)
    drafts: list[Tensor] = []
    for step in range(num_tokens):
        logits, states = head(tokens, states, positions, memory)
        tokens, states = head.token_ids(logits[:, -1:].argmax(-1)), states[:, -1:]
        positions = torch.tensor([num_rows + step])
        drafts.append(tokens)
    return torch.cat(drafts, dim=1)


class UnrolledMemory:
    """The rows of a text at draft steps 0, 1, .. at once, for training on the drafter's own states.

    At step j, row p stands for the j-th recycled row of a draft begun at row p - j: it sees the rows of step 0 up to
    p - j and, of each later step k, row p - j + k. Rows p < j have no such draft; only each other see them.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys.append(per_query_head(k, q.shape[1]))
        self._values.append(per_query_head(v, q.shape[1]).to(q.dtype))
        step, rows = len(self._keys) - 1, q.shape[2]
        visible = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril(-step)
        scores = (q @ self._keys[0].transpose(-1, -2)).masked_fill(~visible, float("-inf"))
        own_keys = [self._keys[k].roll(step - k, dims=2) for k in range(1, step + 1)]
        own_values = [self._values[k].roll(step - k, dims=2) for k in range(1, step + 1)]
        own_scores = [(q * key).sum(-1, keepdim=True) for key in own_keys]
        weights = (torch.cat([scores, *own_scores], dim=-1) * q.shape[-1] ** -0.5).softmax(-1)
        output = weights[..., :rows] @ self._values[0]
        for index, value in enumerate(own_values):
            output = output + weights[..., rows + index, None] * value
        return output


def unrolled_loss(
    head: RowDrafter, features: Tensor, tokens: Tensor, labels: Tensor, steps: int, decay: float
) -> Tensor:
    """The mean cross-entropy against `labels` [B, R, D] (probabilities) over `steps` draft steps, later ones less."""
    memory = UnrolledMemory()
    states, positions = head.first_states(features), torch.arange(tokens.shape[1])
    weights = [decay**step for step in range(steps)]
    losses: list[Tensor] = []
    for step in range(steps):
        logits, states = head(tokens, states, positions, memory)
        losses.append(weights[step] * soft_cross_entropy(logits[:, step:], labels[:, step:]))
        states = torch.cat([states[:, :1], states[:, :-1]], dim=1)
    return torch.stack(losses).sum() / sum(weights)


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy in nats of `logits` against the probabilities `labels`, both [..., V]."""
    return -(labels * log_softmax(logits.float(), dim=-1)).sum(-1).mean()
