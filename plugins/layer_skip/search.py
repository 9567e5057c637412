"""Which exit promises most: of a few candidates, on a text that the target writes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sdk import TargetInfo, TargetLayers

NUM_CANDIDATES = 8
NUM_TEXTS = 4
LENGTH = 16  # tokens of each text

Logits = Callable[[Tensor, int], Tensor]
"""The logits [n, V] after each of the tokens [n] that stand from a position on."""


def candidates(num_layers: int) -> list[int]:
    """Exits that are tried: evenly spread, and never all layers."""
    spread = {num_layers * number // NUM_CANDIDATES for number in range(1, NUM_CANDIDATES)}
    return sorted(exit_layer for exit_layer in spread if 0 < exit_layer < num_layers) or [1]


@dataclass(frozen=True)
class Exit:
    """A number of layers, and what drafting with them promises."""

    num_layers: int
    agreement: float  # how often its most likely token is the target's
    speedup: float  # expected


def best_exit(exits: Mapping[int, Logits], whole: Logits, target: TargetInfo, num_drafts: int) -> Exit:
    """The exit with the highest expected speed-up.

    exits: the first layers, by their number. whole: all layers.
    """
    length = LENGTH if target.device == "cpu" else min(LENGTH, target.block_size)  # of one block: nobody owns more
    texts = [_written(whole, target.vocab_size, number, length) for number in range(NUM_TEXTS)]
    expected = torch.cat([_choices(whole, text) for text in texts])
    found = []
    for number, logits in exits.items():
        chosen = torch.cat([_choices(logits, text) for text in texts])
        agreement = (chosen == expected).float().mean().item()
        found.append(Exit(number, agreement, expected_speedup(agreement, number / target.num_layers, num_drafts)))
    return max(found, key=lambda each: each.speedup)


def expected_speedup(agreement: float, share: float, num_drafts: int) -> float:
    """Tokens per round over its cost (arXiv 2211.17192, section 3.4).

    agreement: how often a draft is right. share: of a draft pass in the cost of the target's.
    """
    tokens = sum(agreement**number for number in range(num_drafts + 1))
    return tokens / (1 + num_drafts * share)


def logits_of(layers: TargetLayers, device: torch.device) -> Logits:
    """The layers over a cache that no request owns."""

    def logits(token_ids: Tensor, start: int) -> Tensor:
        token_ids = token_ids.to(device)
        places = torch.arange(len(token_ids), device=device)
        bounds = torch.tensor([0, len(token_ids)], device=device)
        return layers.logits(token_ids, places[:1], torch.full_like(places[:1], start), bounds, places)

    return logits


def _written(whole: Logits, vocab_size: int, number: int, length: int) -> Tensor:
    """A text that the target draws at temperature 1, from a first token by the text's number."""
    generator = torch.Generator().manual_seed(number)
    text = torch.tensor([(number + 1) * vocab_size // (NUM_TEXTS + 1)])
    while len(text) < length:
        probs = whole(text[-1:], len(text) - 1)[0].float().softmax(dim=-1).cpu()
        text = torch.cat([text, torch.multinomial(probs, 1, generator=generator)])
    return text


def _choices(logits: Logits, text: Tensor) -> Tensor:
    return logits(text, 0).argmax(dim=-1)
