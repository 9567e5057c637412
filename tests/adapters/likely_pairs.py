"""How likely pairs of tokens are after a prompt of the tiny target, under a grammar too, and whether samples agree."""

from __future__ import annotations

import torch

from specdec.core.request.grammar import RequestGrammar
from specdec.plugins.xgrammar import XGrammarBackend
from specdec.sdk.structured_outputs import StructuredOutputs, Vocabulary

TEMPERATURE = 0.7
REFUSING = "( list| the| a)(s| for| to| string| given| directory| name|,)( .*)?"
"""After the first of the tiny prompts, the likeliest second tokens are refused: of a list, a list."""


class Grammar:
    """What a regular expression allows of the tiny target's tokens."""

    def __init__(self, tokenizer, regex):
        vocabulary = Vocabulary(tokenizer, len(tokenizer), frozenset())
        started = XGrammarBackend(vocabulary).compile(StructuredOutputs(regex=regex)).start()
        self._grammar, self._vocab_size = RequestGrammar(started, vocabulary), len(tokenizer)

    def allowed(self, ids):
        """After these tokens: [V] bool."""
        return self._grammar.allowed(ids, self._vocab_size)


def likely_pairs(model, prompt, least, grammar=None):
    """The probability of each pair that is as likely as `least`."""

    def following(ids):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1] / TEMPERATURE
        if grammar is not None:
            logits = logits.masked_fill(~grammar.allowed(ids), -torch.inf)
        probs = logits.softmax(dim=-1)
        return {token: float(probs[token]) for token in (probs >= least).nonzero()[:, 0].tolist()}

    pairs = {(a, b): p * q for a, p in following([]).items() for b, q in following([a]).items()}
    return {pair: p for pair, p in pairs.items() if p >= least}


def chi_square(seen, num_samples, pairs):
    """Of the likely pairs and of all others together, as a deviate of the normal distribution."""
    cells = [(seen[pair], p) for pair, p in pairs.items()]
    cells.append((num_samples - sum(count for count, _ in cells), 1 - sum(pairs.values())))
    value = sum((count - num_samples * p) ** 2 / (num_samples * p) for count, p in cells)
    variance = 2 / (9 * len(pairs))  # Wilson and Hilferty (1931)
    return ((value / len(pairs)) ** (1 / 3) - 1 + variance) / variance**0.5
