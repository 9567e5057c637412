"""The training of all row drafters: one text, several draft steps at once, labels from the target."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..batching import Batch
from .first_round import FirstRounds
from .run import NUM_DRAFTS, Job, Workshop, drafter_recipe, run, whole_windows
from .unroll import draft_token_by_token, unrolled_loss

STEP_DECAY = 0.8  # of the loss, from one draft step to the next


def train_rows(
    name: str,
    head: nn.Module,
    workshop: Workshop,
    export: Callable[[], None],
    arguments: argparse.Namespace,
    *,
    num_steps: int,
    vocabulary: Tensor | slice = slice(None),
) -> None:
    """`head`: a RowDrafter; `vocabulary`: the target ids it has logits for; `num_steps`: draft steps trained."""
    target = workshop.target
    head_loss = torch.compile(unrolled_loss, dynamic=False) if arguments.compile else unrolled_loss

    def loss_of(batch: Batch) -> Tensor:
        windows = whole_windows(batch)
        observation = target.observe(windows)
        labels = target.logits(observation.final[:, 1:])[..., vocabulary].float().softmax(-1)
        features = head.features(observation)[:, :-1]
        return head_loss(head, features, windows[:, 1:], labels, num_steps, STEP_DECAY)

    def draft(rounds: FirstRounds) -> Tensor:
        return draft_token_by_token(head, head.features(rounds.observation), rounds.next_tokens, NUM_DRAFTS)

    run(Job(name, head, loss_of, draft, export), workshop, drafter_recipe(arguments), arguments)
