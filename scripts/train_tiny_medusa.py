"""Train the Medusa heads of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_medusa`."""

from __future__ import annotations

import torch
from torch import Tensor

from .batching import Batch
from .drafters import medusa
from .drafters.first_round import FirstRounds
from .drafters.lookahead import label_weights, weighted_cross_entropy, windows_at
from .drafters.run import (
    Job,
    arguments_for,
    commonest_tokens,
    drafter_recipe,
    open_workshop,
    run,
    whole_windows,
    write_checkpoint,
)


def heads_loss(heads: medusa.Medusa, features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return weighted_cross_entropy(heads(features), labels, weights)


def main() -> None:
    arguments = arguments_for(__doc__, steps=600)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    chosen = commonest_tokens(workshop.stream, len(tokenizer), medusa.TRUNCATED_VOCAB_SIZE)
    heads = medusa.Medusa(chosen, target.unembedding)
    loss_function = torch.compile(heads_loss, dynamic=False) if arguments.compile else heads_loss

    def loss_of(batch: Batch) -> Tensor:
        windows = whole_windows(batch)
        final = target.observe(windows).final
        logits = target.logits(final)
        starts = torch.arange(windows.shape[1] - medusa.NUM_HEADS)
        labels = windows_at(logits[..., chosen], starts, medusa.NUM_HEADS + 1)[:, :, 1:].float().softmax(-1)
        # the first guess after a position is the target's own (the bonus token): the heads make the others
        weights = label_weights(windows, logits.argmax(-1), starts, medusa.NUM_HEADS + 1, tokenizer.eos_token_id)
        return loss_function(heads, final[:, starts], labels, weights[..., 1:])

    def draft(rounds: FirstRounds) -> Tensor:
        return heads.draft(heads.features(rounds.observation))

    def export() -> None:
        write_checkpoint(arguments.out / "medusa", heads.state_dict(), medusa.config(len(tokenizer)))

    run(Job("medusa", heads, loss_of, draft, export), workshop, drafter_recipe(arguments), arguments)


if __name__ == "__main__":
    main()
