"""One training run of one drafter: text, frozen target, progress on held-out prompts, exports, the record."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..batching import Batch, TokenStream, encode_documents
from ..corpus import load_corpus
from ..training import Recipe, train
from .first_round import Acceptance, FirstRounds, acceptance, first_rounds, held_out_prompts
from .target import FrozenTarget

NUM_PROGRESS_PROMPTS = 128
NUM_DRAFTS = 7


@dataclass(frozen=True)
class Workshop:
    """What every drafter is trained with."""

    tokenizer: PreTrainedTokenizerBase
    target: FrozenTarget
    stream: TokenStream
    rounds: FirstRounds  # for progress, with features as the drafter is trained on


@dataclass(frozen=True)
class Job:
    """One drafter to train."""

    name: str
    module: nn.Module
    loss_of: Callable[[Batch], Tensor]
    draft: Callable[[FirstRounds], Tensor]  # [B, K] greedy drafts
    export: Callable[[], None]


def arguments_for(description: str | None, *, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("assets/tiny"))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--export-every", type=int, default=200, help="steps between exports")
    parser.add_argument("--compile", action="store_true", help="a minute at the start, faster steps")
    return parser.parse_args()


def drafter_recipe(arguments: argparse.Namespace) -> Recipe:
    """Smaller steps than the target's, and one window length: a drafter's step is dearer than its tokens are many."""
    return Recipe(
        steps=arguments.steps, seed=arguments.seed, tokens_per_step=2048, length=512, long_fraction=0.0, warmup_steps=30
    )


def open_workshop(folder: Path, seed: int) -> Workshop:
    torch.manual_seed(seed)
    corpus = load_corpus()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    target = FrozenTarget(folder, torch.bfloat16)
    prompts = held_out_prompts(tokenizer, corpus.held_out, NUM_PROGRESS_PROMPTS)
    stream = encode_documents(tokenizer, corpus.train)
    return Workshop(tokenizer, target, stream, first_rounds(target, prompts, NUM_DRAFTS))


def commonest_tokens(stream: TokenStream, vocab_size: int, count: int) -> Tensor:
    """The ids of the `count` commonest tokens, ascending: [count]."""
    counts = torch.bincount(stream.ids.long(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def whole_windows(batch: Batch) -> Tensor:
    """Inputs and the token after the last one: [B, T + 1]."""
    return torch.cat([batch.input_ids, batch.next_ids[:, -1:]], dim=1)


def run(job: Job, workshop: Workshop, recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Train, export now and then and at the end, and write the record into `out/training.json`."""
    trained = sum(parameter.numel() for parameter in job.module.parameters() if parameter.requires_grad)
    print(f"{job.name}: {trained:,} trained parameters, {recipe}", flush=True)

    def progress() -> Acceptance:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return acceptance(workshop.rounds, job.draft(workshop.rounds))

    def after_step(step: int, loss: float) -> None:
        if step % 20 == 0:
            print(f"step {step} loss {loss:.3f}", flush=True)
        if step % arguments.export_every == 0:
            job.export()
            print(f"step {step} {progress()}", flush=True)

    effort = train(job.module, job.loss_of, workshop.stream, recipe, after_step)
    job.export()
    record = {
        "recipe": asdict(recipe),
        "effort": asdict(effort),
        "trained_parameters": trained,
        "torch_compile": arguments.compile,
    }
    update_json(arguments.out / "training.json", job.name, record)
    print(f"done: {effort} {progress()}", flush=True)


def update_json(path: Path, key: str, value: Any) -> None:
    """Set one key of the JSON object in `path`, which need not exist."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_whole(path, lambda scratch: scratch.write_text(json.dumps(content | {key: value}, indent=2) + "\n"))


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    write_tensors(folder / "model.safetensors", tensors)
    write_whole(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Floating-point tensors in bf16, the others (id maps) as they are."""
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().contiguous()
        for name, tensor in tensors.items()
    }
    write_whole(path, lambda scratch: save_file(stored, scratch, metadata={"format": "pt"}))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Whole or not at all: readers may be waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent.parent) as scratch:
        new = Path(scratch) / path.name
        write(new)
        new.chmod(0o644)
        os.replace(new, path)
