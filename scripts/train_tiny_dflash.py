"""Train the DFlash drafter of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_dflash --compile`."""

from __future__ import annotations

import torch
from torch import Tensor

from .batching import Batch
from .drafters import dflash
from .drafters.first_round import FirstRounds
from .drafters.lookahead import label_weights, weighted_cross_entropy, windows_at
from .drafters.run import Job, arguments_for, drafter_recipe, open_workshop, run, whole_windows, write_checkpoint

ANCHORS_PER_WINDOW = 80
DISTANCE_SCALE = 4.0  # slots further from the anchor count less: exp(-distance / scale)
NUM_GUESSES = dflash.BLOCK_SIZE - 1


def block_loss(
    head: dflash.DFlash, features: Tensor, anchor_tokens: Tensor, anchors: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    return weighted_cross_entropy(head(features, anchor_tokens, anchors), labels, weights)


def main() -> None:
    arguments = arguments_for(__doc__, steps=2000)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    head = dflash.DFlash(target.embedding, target.unembedding, tokenizer.mask_token_id)
    head_loss = torch.compile(block_loss, dynamic=False) if arguments.compile else block_loss
    by_distance = torch.exp(-torch.arange(NUM_GUESSES) / DISTANCE_SCALE)

    def loss_of(batch: Batch) -> Tensor:
        windows = whole_windows(batch)
        observation = target.observe(windows)
        anchors = 1 + torch.randperm(windows.shape[1] - dflash.BLOCK_SIZE)[:ANCHORS_PER_WINDOW]
        logits = target.logits(observation.final)
        labels = windows_at(logits, anchors, NUM_GUESSES).float().softmax(-1)
        weights = label_weights(windows, logits.argmax(-1), anchors, NUM_GUESSES, tokenizer.eos_token_id)
        features = head.features(observation)[:, :-1]
        return head_loss(head, features, windows[:, anchors], anchors, labels, weights * by_distance)

    def draft(rounds: FirstRounds) -> Tensor:
        return head.draft(head.features(rounds.observation), rounds.greedy[:, 0])

    def export() -> None:
        config = dflash.config(len(tokenizer), tokenizer.mask_token_id)
        write_checkpoint(arguments.out / "dflash", head.state_dict(), config)

    run(Job("dflash", head, loss_of, draft, export), workshop, drafter_recipe(arguments), arguments)


if __name__ == "__main__":
    main()
