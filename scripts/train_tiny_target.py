"""Train the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_target`, half a core hour."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from .batching import Batch, TokenStream, encode_documents
from .corpus import Corpus, load_corpus
from .drafters.first_round import MAX_TOKENS_PER_DOCUMENT
from .drafters.run import arguments_for
from .train_tokenizer import MAX_LENGTH, train_tokenizer
from .training import Effort, Recipe, mean_loss, train

SAMPLE_PROMPT = 'def parse_header(line):\n    """Split a header line into its name and its value."""\n'


def shared_settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What every model of the tiny family has in common."""
    return {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
    }


def target_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=640,
        **shared_settings(tokenizer),
    )


def next_token_loss(model: Qwen3ForCausalLM, compiled: bool) -> Callable[[Batch], Tensor]:
    """The mean cross-entropy of a batch in nats."""

    def loss_of(batch: Batch) -> Tensor:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), batch.next_ids.flatten())

    return torch.compile(loss_of, dynamic=False) if compiled else loss_of


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model (bf16) and tokenizer to `folder`, each file whole or not at all: readers may be waiting."""
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = type(model)(model.config)
    snapshot.load_state_dict(model.state_dict())
    snapshot.tie_weights()
    snapshot.generation_config = model.generation_config
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        snapshot.to(torch.bfloat16).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for path in sorted(Path(scratch).iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)


@torch.no_grad()
def samples(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Continuations of `SAMPLE_PROMPT` by the exported model."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(SAMPLE_PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    greedy = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    sampled = model.generate(**inputs, max_new_tokens=160, do_sample=True, temperature=0.8, top_k=0)
    return {"greedy": tokenizer.decode(greedy[0]), "temperature_0.8": tokenizer.decode(sampled[0])}


def figures(folder: Path, recipe: Recipe, effort: Effort, corpus: Corpus, validation: TokenStream) -> dict[str, Any]:
    """What is written down about a finished run, measured on the exported bf16 weights in fp32 arithmetic."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss_of = next_token_loss(model, compiled=False)
    losses = {str(length): mean_loss(model, loss_of, validation, length=length) for length in (256, 1024)}
    bits = {length: nats / math.log(2) / validation.chars_per_token for length, nats in losses.items()}
    return {
        "recipe": asdict(recipe),
        "effort": asdict(effort),
        "parameters": model.num_parameters(),
        "validation": {
            "documents": [document.name for document in corpus.held_out],
            "tokens": validation.ids.numel(),
            "chars_per_token": validation.chars_per_token,
            "nats_per_token_by_context": losses,
            "bits_per_char_by_context": bits,
        },
        "corpus": {
            "python": platform.python_version(),
            "documents": len(corpus.train),
            "chars": sum(len(document.text) for document in corpus.train),
            "sha256": corpus.sha256,
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def run(recipe: Recipe, out: Path, *, compiled: bool, export_every: int) -> None:
    """Train tokenizer and target and write them to `out/target`, with `out/training.json`."""
    folder = out / "target"
    torch.manual_seed(recipe.seed)
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus)
    stream = encode_documents(tokenizer, corpus.train)
    validation = encode_documents(tokenizer, corpus.held_out, MAX_TOKENS_PER_DOCUMENT)
    model = Qwen3ForCausalLM(target_config(tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    print(f"{model.num_parameters():,} parameters, {stream.ids.numel():,} tokens, {recipe}", flush=True)

    def after_step(step: int, loss: float) -> None:
        if step % 20 == 0:
            print(f"step {step} loss {loss:.3f}", flush=True)
        if step % export_every == 0:
            export(model, tokenizer, folder)
            short = mean_loss(model, next_token_loss(model, compiled=False), validation, length=recipe.length)
            print(f"step {step} validation loss {short:.4f}", flush=True)

    effort = train(model, next_token_loss(model, compiled), stream, recipe, after_step)
    export(model, tokenizer, folder)
    result = figures(folder, recipe, effort, corpus, validation) | {"samples": samples(folder, tokenizer)}
    (out / "training.json").write_text(json.dumps({"target": result}, indent=2) + "\n")
    print(json.dumps(result["validation"]["nats_per_token_by_context"]), flush=True)


def main() -> None:
    arguments = arguments_for(__doc__, steps=1500)
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed)
    run(recipe, arguments.out, compiled=arguments.compile, export_every=arguments.export_every)


if __name__ == "__main__":
    main()
