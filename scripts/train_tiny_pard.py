"""Teach the tiny target's draft model to draft in parallel: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_pard`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from .batching import Batch
from .drafters.distil import copy_tokenizer
from .drafters.first_round import FirstRounds
from .drafters.lookahead import label_weights, weighted_cross_entropy
from .drafters.pard import NUM_DRAFTS, draft_in_parallel, drop_deeper, logits_with_blocks
from .drafters.run import Job, arguments_for, drafter_recipe, open_workshop, run
from .drafters.unroll import soft_cross_entropy
from .train_tiny_target import export

ANCHORS_PER_WINDOW = 160


def main() -> None:
    arguments = arguments_for(__doc__, steps=900)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    mask_id = tokenizer.mask_token_id
    model = AutoModelForCausalLM.from_pretrained(arguments.out / "draft", dtype=torch.float32, local_files_only=True)
    model.config.pard_token = mask_id

    def loss_of(batch: Batch) -> Tensor:
        logits = target.logits(target.observe(batch.input_ids).final)
        labels = logits.float().softmax(-1)
        anchors = torch.randperm(batch.input_ids.shape[1] - NUM_DRAFTS)[:ANCHORS_PER_WINDOW]
        weights = label_weights(batch.input_ids, logits.argmax(-1), anchors, NUM_DRAFTS, tokenizer.eos_token_id)
        rows = drop_deeper(anchors)
        own, masked = logits_with_blocks(model, batch.input_ids, mask_id, rows)
        ahead = weighted_cross_entropy(masked, labels[:, rows.positions], weights[:, rows.blocks, 1 + rows.depths])
        return soft_cross_entropy(own, labels) + ahead

    def draft(rounds: FirstRounds) -> Tensor:
        return draft_in_parallel(model, torch.cat([rounds.prompts, rounds.greedy[:, :1]], dim=1), mask_id)

    def export_all() -> None:
        export(model, tokenizer, arguments.out / "pard")
        copy_tokenizer(arguments.out / "target", arguments.out / "pard")

    # a trained model: the rates that it began with would undo what it knows
    recipe = replace(drafter_recipe(arguments), muon_lr=0.005, adamw_lr=1e-3)
    run(Job("pard", model, loss_of, draft, export_all), workshop, recipe, arguments)


if __name__ == "__main__":
    main()
