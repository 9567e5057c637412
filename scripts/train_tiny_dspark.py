"""Train the DSpark drafter of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_dspark --compile`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from .drafters import dspark
from .drafters.block_training import train_blocks
from .drafters.lookahead import weighted_cross_entropy
from .drafters.run import arguments_for, open_workshop


def block_loss(
    head: dspark.DSpark, features: Tensor, before: Tensor, anchors: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    logits, told = head.guess(head.outputs(features, before[..., 0], anchors), before)
    covered = torch.minimum(logits.detach().float().softmax(-1), labels).sum(-1)  # the chance to be accepted
    surprise = binary_cross_entropy_with_logits(told.float(), covered, weights)
    return weighted_cross_entropy(logits, labels, weights) + surprise / weights.mean()


def main() -> None:
    arguments = arguments_for(__doc__, steps=2000)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    head = dspark.DSpark(target.embedding, target.unembedding, tokenizer.mask_token_id)
    config = dspark.config(len(tokenizer), tokenizer.mask_token_id)
    train_blocks("dspark", head, config, block_loss, workshop, arguments)


if __name__ == "__main__":
    main()
