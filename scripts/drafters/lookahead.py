"""Labels for drafters that guess several tokens ahead without seeing those between (DFlash, Medusa)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

OFF_PATH_WEIGHT = 0.25  # of a label that follows a token the target would not have chosen


def windows_at(x: Tensor, starts: Tensor, length: int) -> Tensor:
    """`x[:, s : s + length]` for every s in `starts` [M]: [B, M, length, ...]."""
    return x[:, starts[:, None] + torch.arange(length)]


def label_weights(tokens: Tensor, choices: Tensor, starts: Tensor, length: int, eos_token_id: int) -> Tensor:
    """How much the label of each guess counts, [B, M, length], before any weight by distance.

    Guess j (from 0) of start s is for the position s + 1 + j. `tokens` [B, T] is the text, `choices` [B, T] the
    target's likeliest next token at each position. A greedy round ends where the text leaves the target's choices, so
    labels after that count less, and labels in the next document not at all.
    """
    between = windows_at(tokens, starts, length)  # the newest known token, then the unseen ones
    same_document = (between != eos_token_id).long().cumprod(-1)
    unseen_as_chosen = between[..., 1:] == windows_at(choices, starts, length - 1)
    on_path = torch.cat([torch.ones_like(between[..., :1]), unseen_as_chosen.long().cumprod(-1)], dim=-1)
    return same_document * (OFF_PATH_WEIGHT + (1 - OFF_PATH_WEIGHT) * on_path)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean, in nats, of `logits` [..., V] against probabilities `labels` [..., V]."""
    losses = -(labels * log_softmax(logits.float(), dim=-1)).sum(-1)
    return (losses * weights).sum() / weights.sum()
