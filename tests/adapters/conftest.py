"""The tiny target as transformers runs it, and prompts for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec

sys.path.insert(0, str(Path(__file__).parent))  # classes are named by their path

TINY = (Path(specdec.__file__).parent / "assets" / "tiny").resolve()


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="session")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """Two of the shipped prompts, [1, T] each."""
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    return [tokenizer(row["prompt"], return_tensors="pt")["input_ids"] for row in rows[:6:3]]
