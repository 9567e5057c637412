"""Train the DFlash drafter of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_dflash --compile`."""

from __future__ import annotations

from torch import Tensor

from .drafters import dflash
from .drafters.block_training import train_blocks
from .drafters.lookahead import weighted_cross_entropy
from .drafters.run import arguments_for, open_workshop


def block_loss(
    head: dflash.DFlash, features: Tensor, before: Tensor, anchors: Tensor, labels: Tensor, weights: Tensor
) -> Tensor:
    return weighted_cross_entropy(head(features, before[..., 0], anchors), labels, weights)


def main() -> None:
    arguments = arguments_for(__doc__, steps=2000)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    head = dflash.DFlash(target.embedding, target.unembedding, tokenizer.mask_token_id)
    config = dflash.config(len(tokenizer), tokenizer.mask_token_id)
    train_blocks("dflash", head, config, block_loss, workshop, arguments)


if __name__ == "__main__":
    main()
