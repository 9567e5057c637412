"""What the engine is compared with: transformers running the same weights on the shipped prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))  # proposers are named by class path, helpers imported by name

from engine_helpers import TINY, generate


@pytest.fixture(scope="session")
def target_path():
    return TINY / "target"


@pytest.fixture(scope="session")
def tokenizer(target_path):
    return AutoTokenizer.from_pretrained(target_path)


@pytest.fixture(scope="session")
def reference_model(target_path):
    """The target as transformers runs it: fp32, never ending at the end-of-sequence token."""
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """16 of the shipped prompts as token ids, lengths mixed."""
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    token_ids = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    return token_ids[::3] + token_ids[1::3]


@pytest.fixture(scope="session")
def truth(reference_model, prompts):
    """What transformers' greedy `generate` appends to each prompt."""
    return [generate(reference_model, prompt) for prompt in prompts]


@pytest.fixture(scope="session")
def sequences(prompts, truth):
    """Prompts with their greedy continuations: what a proposer that knows the truth is told."""
    return [[*prompt, *output] for prompt, output in zip(prompts, truth, strict=True)]
