"""What drafts of forced text gain under a grammar, and what masks cost.

    python -m benchmarks.structured_outputs [--rounds 5] [--save FILE]

Engines take turns within a round, batch 1, greedy. The ratio of a round is that of their tokens per second, and the
median over rounds is printed. Masks are those of a vocabulary of 128,000 tokens, for 8 requests with 5 drafts each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import LLM, SamplingParams
from specdec.core.request.grammar import RequestGrammar, unpacked
from specdec.plugins.forced import ForcedProposer
from specdec.plugins.ngram import NgramProposer
from specdec.plugins.xgrammar import XGrammarBackend
from specdec.sdk.combinators import Chain
from specdec.sdk.structured_outputs import StructuredOutputs, Vocabulary

NAME, NUMBER = {"type": "string", "maxLength": 16}, {"type": "integer", "minimum": 0, "maximum": 9999}


def closed(**properties):
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties]}


SCHEMAS = {
    "tool call": closed(
        name={"enum": ["search_flights", "book_hotel", "get_weather"]},
        arguments=closed(destination=NAME, departure_date=NAME, num_travellers=NUMBER),
    ),
    "invoice": closed(
        invoice_number=NUMBER,
        customer=closed(name=NAME, postal_code=NUMBER, country={"enum": ["France", "Italy", "Spain"]}),
        total_amount=NUMBER,
        currency={"const": "EUR"},
    ),
    "prose answer": closed(answer={"type": "string", "maxLength": 200}, confidence={"enum": ["low", "high"]}),
    "free": None,
}
PROMPTS = ["def call(", "Answer as JSON: ", "class Invoice:\n    ", "# the customer asks for\n"]


class ForcedThenNgram(Chain):
    """What is forced, else what stood in the text before."""

    parts = (ForcedProposer, NgramProposer)


K = {"num_speculative_tokens": 8}
ENGINES = {
    "plain": None,
    "ngram": {"method": "ngram", **K},
    "forced": {"method": "forced", **K},
    "both": {"method": f"{__name__}:ForcedThenNgram", **K},
}


def run(llm, schema):
    """Tokens per second of all prompts, one after the other, their texts, and tokens per step."""
    asked = None if schema is None else {"json": schema, "disable_any_whitespace": True}
    params = SamplingParams(temperature=0, max_tokens=96, structured_outputs=asked)
    started, before = time.perf_counter(), llm.engine.metrics.counts["num_steps"]
    texts = [llm.generate(prompt, params)[0].outputs[0] for prompt in PROMPTS]
    seconds, num_tokens = time.perf_counter() - started, sum(len(each.token_ids) for each in texts)
    return (
        num_tokens / seconds,
        [each.text for each in texts],
        num_tokens / (llm.engine.metrics.counts["num_steps"] - before),
    )


def gains(rounds):
    """For each schema: median ratios to n-grams alone, and tokens per step."""
    found = {}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(LLM("tiny", speculative_config=each)) for name, each in ENGINES.items()}
        for kind, schema in SCHEMAS.items():
            for llm in engines.values():
                run(llm, schema)
            turns = [{name: run(llm, schema) for name, llm in engines.items()} for _ in range(rounds)]
            assert all(each[name][1] == each["plain"][1] for each in turns for name in engines), "texts differ"
            ratios = {name: [each[name][0] / each["ngram"][0] for each in turns] for name in engines}
            found[kind] = {
                "to_ngram": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
                "tokens_per_step": {name: round(turns[0][name][2], 2) for name in engines},
            }
            print(kind, json.dumps(found[kind]))
    return found


def large_tokenizer(size):
    """Words of made-up syllables, and every printable character."""
    draw = random.Random(0)
    words = {chr(code) for code in range(32, 127)}
    while len(words) < size - 1:
        words.add("".join(draw.choice('abcdefghijklmnopqrstuvwxyz "{}:,0123456789') for _ in range(draw.randint(2, 7))))
    inner = Tokenizer(models.WordLevel({"</s>": 0, **{word: place for place, word in enumerate(sorted(words), 1)}}))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def mask_cost(size=128_000, num_requests=8, num_drafts=5):
    """Milliseconds of filling and of applying the masks of one step, medians of 20."""
    vocabulary = Vocabulary(large_tokenizer(size), size, frozenset([0]))
    compiled = XGrammarBackend(vocabulary).compile(StructuredOutputs(json=SCHEMAS["invoice"]))
    draft = [vocabulary.tokenizer.convert_tokens_to_ids(each) for each in '{"inv'][:num_drafts]
    logits, filling, applying = torch.randn(num_requests * (num_drafts + 1), size), [], []
    for _ in range(20):
        grammars = [RequestGrammar(compiled.start(), vocabulary) for _ in range(num_requests)]
        started = time.perf_counter()
        masks = [each.masks(draft) for each in grammars]
        filled = time.perf_counter()
        for words, rows in zip(masks, logits.split(num_drafts + 1), strict=True):
            rows.masked_fill_(unpacked(~words, size), float("-inf"))
        filling.append(filled - started)
        applying.append(time.perf_counter() - filled)
    return {
        "filling_ms": round(1e3 * statistics.median(filling), 2),
        "applying_ms": round(1e3 * statistics.median(applying), 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    masks = mask_cost()
    print("masks", json.dumps(masks))
    found = {"load": os.getloadavg()[0], "masks": masks, "schemas": gains(args.rounds)}
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
