"""Train the DSpark drafter of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_dspark --compile`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from .batching import Batch
from .drafters import dspark
from .drafters.first_round import FirstRounds
from .drafters.lookahead import label_weights, weighted_cross_entropy, windows_at
from .drafters.run import Job, arguments_for, drafter_recipe, open_workshop, run, whole_windows, write_checkpoint

ANCHORS_PER_WINDOW = 80
DISTANCE_SCALE = 4.0  # slots further from the anchor count less: exp(-distance / scale)


def block_loss(
    head: dspark.DSpark, features: Tensor, before: Tensor, anchors: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    """`before` [B, M, W]: the text's tokens before those that the slots draft; `labels` [B, M, W, V]."""
    logits, told = head.guess(head.outputs(features, before[..., 0], anchors), before)
    covered = torch.minimum(logits.detach().float().softmax(-1), labels).sum(-1)  # the chance to be accepted
    surprise = binary_cross_entropy_with_logits(told.float(), covered, weights)
    return weighted_cross_entropy(logits, labels, weights) + surprise / weights.mean()


def main() -> None:
    arguments = arguments_for(__doc__, steps=2000)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    head = dspark.DSpark(target.embedding, target.unembedding, tokenizer.mask_token_id)
    head_loss = torch.compile(block_loss, dynamic=False) if arguments.compile else block_loss
    by_distance = torch.exp(-torch.arange(dspark.BLOCK_SIZE) / DISTANCE_SCALE)

    def loss_of(batch: Batch) -> Tensor:
        windows = whole_windows(batch)
        observation = target.observe(windows)
        anchors = 1 + torch.randperm(windows.shape[1] - dspark.BLOCK_SIZE - 1)[:ANCHORS_PER_WINDOW]
        logits = target.logits(observation.final)
        labels = windows_at(logits, anchors, dspark.BLOCK_SIZE).float().softmax(-1)
        weights = label_weights(windows, logits.argmax(-1), anchors, dspark.BLOCK_SIZE, tokenizer.eos_token_id)
        before = windows_at(windows, anchors, dspark.BLOCK_SIZE)
        features = head.features(observation)[:, :-1]
        return head_loss(head, features, before, anchors, labels, weights * by_distance)

    def draft(rounds: FirstRounds) -> Tensor:
        return head.draft(head.features(rounds.observation), rounds.greedy[:, 0])

    def export() -> None:
        config = dspark.config(len(tokenizer), tokenizer.mask_token_id)
        write_checkpoint(arguments.out / "dspark", head.state_dict(), config)

    run(Job("dspark", head, loss_of, draft, export), workshop, drafter_recipe(arguments), arguments)


if __name__ == "__main__":
    main()
