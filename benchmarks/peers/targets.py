"""The models of the comparison, and their prompts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec.core.model.model_support import locate_model
from specdec.lab.datasets import load_dataset, of_category

from .contender import Target
from .successors import CIRCLE, put_in_circles

VOCABULARY = 32000
CATEGORIES = ("code", "prose", "repetition")
DRAFTERS = {"draft_model": "draft", "eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash", "medusa": "medusa"}


def tiny() -> Target:
    """The packaged model of 6.6 M parameters, really trained, with all its drafters."""
    drafters = {method: locate_model(f"tiny/{name}") for method, name in DRAFTERS.items()}
    return Target("tiny", locate_model("tiny"), drafters, ("plain", "ngram", *DRAFTERS, "mtp"))


def random_llama(directory: Path) -> Target:
    """A Llama that goes in circles, of 0.13 B parameters of which a step reads 0.11 B; and a draft model like it."""
    sizes = {"target": 12, "draft": 2}
    for name, num_layers in sizes.items():
        circling_llama(num_layers).save_pretrained(directory / name)
    drafters = {"draft_model": str(directory / "draft")}
    methods = ("plain", "ngram", "draft_model", "synthetic")
    return Target("random-0.1b", str(directory / "target"), drafters, methods)


def circling_llama(num_layers: int) -> LlamaForCausalLM:
    """Random weights, put in circles."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return put_in_circles(LlamaForCausalLM(config).eval())


def prompts_of(target: Target, category: str, count: int) -> list[list[int]]:
    """Token ids: shipped prompts of a category, in turn if there are too few; random tokens for random weights."""
    if target.name == "tiny":
        tokenizer = AutoTokenizer.from_pretrained(target.path)
        rows = of_category(load_dataset("packaged", None), category)
        ids = [tokenizer(row.prompt)["input_ids"] for row in rows]
        return [ids[index % len(ids)] for index in range(count)]
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CIRCLE, VOCABULARY, (count, 64), generator=generator).tolist()
