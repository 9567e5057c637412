"""Teach the tiny target's draft model to draft in parallel: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_pard`."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from .batching import Batch
from .drafters.distil import TOKENIZER_FILES
from .drafters.first_round import FirstRounds
from .drafters.lookahead import label_weights, weighted_cross_entropy, windows_at
from .drafters.pard import NUM_DRAFTS, NUM_MASKS, draft_in_parallel, logits_with_blocks
from .drafters.run import Job, arguments_for, drafter_recipe, open_workshop, run
from .drafters.unroll import soft_cross_entropy
from .train_tiny_target import export

ANCHORS_PER_WINDOW = 40


def main() -> None:
    arguments = arguments_for(__doc__, steps=900)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    mask_id = tokenizer.mask_token_id
    model = AutoModelForCausalLM.from_pretrained(arguments.out / "draft", dtype=torch.float32, local_files_only=True)
    model.config.pard_token = mask_id

    def loss_of(batch: Batch) -> Tensor:
        logits = target.logits(target.observe(batch.input_ids).final)
        labels, choices = logits.float().softmax(-1), logits.argmax(-1)
        anchors = torch.randperm(batch.input_ids.shape[1] - NUM_DRAFTS)[:ANCHORS_PER_WINDOW]
        own, blocks = logits_with_blocks(model, batch.input_ids, mask_id, anchors)
        weights = label_weights(batch.input_ids, choices, anchors, NUM_DRAFTS, tokenizer.eos_token_id)
        ahead = windows_at(labels, anchors + 1, NUM_MASKS)
        return soft_cross_entropy(own, labels) + weighted_cross_entropy(blocks, ahead, weights[..., 1:])

    def draft(rounds: FirstRounds) -> Tensor:
        return draft_in_parallel(model, torch.cat([rounds.prompts, rounds.greedy[:, :1]], dim=1), mask_id)

    def export_all() -> None:
        export(model, tokenizer, arguments.out / "pard")
        for name in TOKENIZER_FILES:
            (arguments.out / "pard" / name).write_bytes((arguments.out / "target" / name).read_bytes())

    run(Job("pard", model, loss_of, draft, export_all), workshop, drafter_recipe(arguments), arguments)


if __name__ == "__main__":
    main()
