"""The training of drafters that guess a block in one pass: many blocks of one text, labels from the target."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batching import Batch
from .dflash import DFlash
from .first_round import FirstRounds
from .lookahead import label_weights, windows_at
from .run import Job, Workshop, drafter_recipe, run, whole_windows, write_checkpoint

ANCHORS_PER_WINDOW = 80
DISTANCE_SCALE = 4.0  # slots further from the anchor count less: exp(-distance / scale)
NUM_GUESSES = 7

BlockLoss = Callable[[Any, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of (head, features, before [B, M, W], anchors [M], labels [B, M, W, V], weights [B, M, W]), in nats.

`before`: the text's tokens before those that the slots draft.
"""


def train_blocks(
    name: str,
    head: DFlash,
    config: dict[str, Any],
    block_loss: BlockLoss,
    workshop: Workshop,
    arguments: argparse.Namespace,
) -> None:
    """Train the head, and write its checkpoint to `out/name`."""
    target, eos_token_id = workshop.target, workshop.tokenizer.eos_token_id
    head_loss = torch.compile(block_loss, dynamic=False) if arguments.compile else block_loss
    by_distance = torch.exp(-torch.arange(NUM_GUESSES) / DISTANCE_SCALE)

    def loss_of(batch: Batch) -> Tensor:
        windows = whole_windows(batch)
        observation = target.observe(windows)
        anchors = 1 + torch.randperm(windows.shape[1] - NUM_GUESSES - 1)[:ANCHORS_PER_WINDOW]
        logits = target.logits(observation.final)
        labels = windows_at(logits, anchors, NUM_GUESSES).float().softmax(-1)
        weights = label_weights(windows, logits.argmax(-1), anchors, NUM_GUESSES, eos_token_id)
        before = windows_at(windows, anchors, NUM_GUESSES)
        features = head.features(observation)[:, :-1]
        return head_loss(head, features, before, anchors, labels, weights * by_distance)

    def draft(rounds: FirstRounds) -> Tensor:
        return head.draft(head.features(rounds.observation), rounds.greedy[:, 0])

    def export() -> None:
        write_checkpoint(arguments.out / name, head.state_dict(), config)

    run(Job(name, head, loss_of, draft, export), workshop, drafter_recipe(arguments), arguments)
