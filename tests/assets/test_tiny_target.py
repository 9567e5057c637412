"""The shipped tiny target: it loads offline, has learnt Python, and is what its card says."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec

ASSETS = (Path(specdec.__file__).parent / "assets").resolve()
TINY = ASSETS / "tiny"
TARGET = TINY / "target"
SMALLEST_MARGIN = 1e-3  # of logits, fp32
MAX_BITS_PER_CHAR = 0.9  # measured: 0.76 and 0.73; an untrained model has 3.4

UNSEEN_CODE = '''class ShelfCounter:
    """Count how many books stand on each shelf of a library."""

    def __init__(self, shelves=None):
        self._counts = {}
        for shelf in shelves or ():
            self._counts[shelf] = 0

    def add_book(self, shelf, number=1):
        """Put *number* books on *shelf* and return the new count."""
        if number < 0:
            raise ValueError("number must not be negative")
        if shelf not in self._counts:
            raise KeyError(shelf)
        self._counts[shelf] += number
        return self._counts[shelf]

    def remove_book(self, shelf, number=1):
        """Take *number* books from *shelf* and return the new count."""
        if number > self._counts[shelf]:
            raise ValueError("not enough books on the shelf")
        self._counts[shelf] -= number
        return self._counts[shelf]

    def __len__(self):
        return sum(self._counts.values())

    def __repr__(self):
        return "%s(%r)" % (self.__class__.__name__, self._counts)
'''

UNICODE_TEXTS = [
    "",
    " leading and trailing spaces  ",
    "def f(x):\n\n    return x\t# tab\r\n",
    "naïve café, Ελληνικά, кириллица, 漢字かな, עברית",
    "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL} cafe\N{COMBINING ACUTE ACCENT}",
    "".join(map(chr, range(1, 256))),
    "\N{REPLACEMENT CHARACTER}\u2028\U0010ffff",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET, local_files_only=True)


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, local_files_only=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line) for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def continuation_of(prompt, target, tokenizer, max_new_tokens):
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def bits_per_char(text, target, tokenizer):
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
    with torch.no_grad():
        logits = target(input_ids=ids).logits[0, :-1]
    return cross_entropy(logits, ids[0, 1:], reduction="sum").item() / math.log(2) / len(text)


def test_config_has_the_documented_shape(target):
    config = target.config
    assert config.model_type == "qwen3"
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (256, 8, 640)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (4096, 4096)
    assert config.tie_word_embeddings
    assert target.num_parameters() == 6_558_976


def test_weights_are_finite_bf16_without_a_second_copy_of_the_tied_head():
    with safe_open(TARGET / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        tensors = [weights.get_tensor(name) for name in names]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors)


def test_special_tokens_are_the_last_ids(tokenizer, target):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>", "<|reserved_0|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [4080, 4081, 4082, 4083, 4084, 4085]
    assert len(tokenizer) == target.config.vocab_size
    assert tokenizer.eos_token_id == target.config.eos_token_id == target.generation_config.eos_token_id == 4080
    assert tokenizer.pad_token_id == target.config.pad_token_id == 4083
    assert tokenizer.mask_token_id == 4084


def test_markers_in_a_text_become_single_tokens(tokenizer):
    assert tokenizer("<|im_start|>x<|im_end|>")["input_ids"] == [4081, *tokenizer("x")["input_ids"], 4082]


@pytest.mark.parametrize("text", UNICODE_TEXTS, ids=range(len(UNICODE_TEXTS)))
def test_tokenizer_round_trip_is_lossless(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_renders_turns_and_the_generation_prompt(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort a list."}]
    history = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSort a list.<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == history
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened == history + "<|im_start|>assistant\n"


def test_unseen_code_is_well_predicted(target, tokenizer):
    assert bits_per_char(UNSEEN_CODE, target, tokenizer) < MAX_BITS_PER_CHAR


def test_prediction_holds_up_in_a_thousand_token_context(target, tokenizer, prompts):
    text = "\n\n".join(prompt["prompt"] for prompt in prompts if prompt["category"] == "code")
    assert len(tokenizer(text)["input_ids"]) > 1000
    assert bits_per_char(text, target, tokenizer) < MAX_BITS_PER_CHAR


def test_greedy_continuation_of_a_function_is_python(target, tokenizer):
    prompt = """def check(value):
    \"\"\"Raise TypeError if value is not a string.\"\"\"
    if not isinstance(value, str):
"""
    lines = continuation_of(prompt, target, tokenizer, 48).splitlines(keepends=True)
    body = "".join(takewhile(lambda line: line.startswith("    ") or not line.strip(), lines))
    (function,) = ast.parse(prompt + body).body
    (raised,) = (node for node in ast.walk(function) if isinstance(node, ast.Raise))
    assert "TypeError" in ast.unparse(raised)
    assert any(isinstance(node, ast.Return) for node in ast.walk(function))


def test_prompts_are_eight_of_each_category(prompts):
    assert all(set(prompt) == {"prompt_id", "category", "prompt"} for prompt in prompts)
    assert Counter(prompt["category"] for prompt in prompts) == {"code": 8, "prose": 8, "repetition": 8}
    assert len({prompt["prompt_id"] for prompt in prompts}) == len(prompts)


def test_prompts_leave_room_in_the_trained_context(prompts, tokenizer):
    assert all(40 <= len(tokenizer(prompt["prompt"])["input_ids"]) <= 200 for prompt in prompts)


@pytest.mark.full
def test_greedy_continuations_have_no_near_tie(target, tokenizer, prompts):
    for prompt in prompts:
        inputs = tokenizer(prompt["prompt"], return_tensors="pt", return_token_type_ids=False)
        output = target.generate(
            **inputs, max_new_tokens=128, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        first, second = torch.cat(output.scores).topk(2, dim=-1).values.unbind(-1)
        assert (first - second).min() > SMALLEST_MARGIN, prompt["prompt_id"]


def test_card_quotes_the_recorded_figures():
    record = json.loads((TINY / "training.json").read_text(encoding="utf-8"))["target"]
    card = (TINY / "README.md").read_text(encoding="utf-8")
    for context, nats in record["validation"]["nats_per_token_by_context"].items():
        assert f"{nats:.2f}" in card
        assert f"{record['validation']['bits_per_char_by_context'][context]:.2f}" in card
    assert f"{record['parameters']:,}" in card
    assert f"--steps {record['recipe']['steps']}" in card
