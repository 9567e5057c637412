"""A target of five tokens, a grammar that allows three of them, and the exact distribution of its texts."""

from __future__ import annotations

from collections import Counter

import torch
from test_transformers import chi_square_of, distribution_of, small_model_of_five, tail_bound
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

TOKENS = "abcde"
ALLOWED = [0, 2, 3]  # the proposer `Drawn` draws the last token two times in three
PROMPT = [1, 2, 3]
TEMPERATURE = 0.7
SAMPLING = {"temperature": TEMPERATURE, "max_tokens": 4, "seed": 3, "structured_outputs": {"regex": "[acd]{4}"}}
OTHER = 5  # the seed of a model whose drafts, cut before refused tokens, are biased by .18 (chi-square of one text)
ENGINE = {"max_model_len": 32, "max_num_seqs": 50}


class Grammar(LogitsProcessor):
    """What the regular expression allows at each place."""

    def __call__(self, input_ids, scores):
        allowed = torch.full_like(scores, -float("inf"))
        allowed[:, ALLOWED] = scores[:, ALLOWED]
        return allowed


def write_target(directory, seed=3):
    """The model, which vLLM finds in the directory with a tokenizer of letters."""
    target = small_model_of_five(head_dim=32, seed=seed)  # vLLM attends on a CPU with no smaller heads
    target.save_pretrained(directory)
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(TOKENS)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(directory)
    return target


def chi_square(target, texts):
    """Of three tokens of each text against the exact distribution: as multiples of what 1 in a million exceeds."""
    counts = torch.zeros(5, 5, 5)
    for text, seen in Counter(tuple(one[:3]) for one in texts).items():
        counts[text] = seen
    processors = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), Grammar()])
    statistic, degrees = chi_square_of(counts, distribution_of(target, torch.tensor([PROMPT]), 3, processors))
    return statistic / tail_bound(degrees)
