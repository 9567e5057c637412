"""The training of whole language models on another model's distributions: draft models and the tiny MoE."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..batching import Batch
from ..train_tiny_target import export
from .first_round import FirstRounds
from .run import NUM_DRAFTS, Job, drafter_recipe, open_workshop, run
from .target import FrozenTarget, continue_greedily
from .unroll import soft_cross_entropy

BALANCE_WEIGHT = 1e-2


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Byte for byte: a tokenizer that was loaded saves how it was loaded."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((source / name).read_bytes())


def start_from(teacher: FrozenTarget, student: PreTrainedModel) -> None:
    """Give the student the teacher's embedding in its main directions, scaled to the student's own start."""
    own = student.get_input_embeddings().weight
    embedding = teacher.embedding.float()
    directions = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False).Vh[: own.shape[1]]
    projected = embedding @ directions.T
    with torch.no_grad():
        own.copy_(projected * (own.std() / projected.std()))


def distil(
    name: str,
    teacher_name: str,
    student_of: Callable[[PreTrainedTokenizerBase], PreTrainedModel],
    arguments: argparse.Namespace,
    *,
    routed: bool = False,
) -> None:
    """Train `student_of(tokenizer)` on the next-token distributions of the model in `out/teacher_name`.

    `routed`: the student is a mixture of experts; the usual auxiliary loss keeps its experts evenly used.
    """
    workshop = open_workshop(arguments.out / teacher_name, arguments.seed)
    teacher, tokenizer = workshop.target, workshop.tokenizer
    student = student_of(tokenizer)
    student.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    start_from(teacher, student)
    options = {"output_router_logits": True} if routed else {}

    def student_loss(ids: Tensor, labels: Tensor) -> Tensor:
        output = student(input_ids=ids, use_cache=False, **options)
        loss = soft_cross_entropy(output.logits, labels)
        return loss + BALANCE_WEIGHT * output.aux_loss if routed else loss

    compiled_loss = torch.compile(student_loss, dynamic=False) if arguments.compile else student_loss

    def loss_of(batch: Batch) -> Tensor:
        labels = teacher.logits(teacher.observe(batch.input_ids).final).float().softmax(-1)
        return compiled_loss(batch.input_ids, labels)

    def draft(rounds: FirstRounds) -> Tensor:
        known = torch.cat([rounds.prompts, rounds.greedy[:, :1]], dim=1)
        return continue_greedily(student, known, NUM_DRAFTS)

    def export_all() -> None:
        export(student, tokenizer, arguments.out / name)
        copy_tokenizer(arguments.out / teacher_name, arguments.out / name)

    run(Job(name, student, loss_of, draft, export_all), workshop, drafter_recipe(arguments), arguments)
