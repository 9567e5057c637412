"""The texts of single tokens, for views of how a text came about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .measure import Pass


def token_texts(tokenizer: Any, passes: Sequence[Pass]) -> dict[str, str]:
    """The text of every token that was drafted or put out, by its id; empty without a tokenizer."""
    steps = (step for each in passes for steps in each.steps.values() for step in steps)
    outputs = (output for each in passes for output in each.outputs.values())
    return texts_of(tokenizer, {*_all(outputs), *_all(step.draft_token_ids for step in steps)})


def texts_of(tokenizer: Any, token_ids: Iterable[int]) -> dict[str, str]:
    """The text of each token by its id, as it stands behind another one; empty without a tokenizer."""
    if tokenizer is None:
        return {}
    before = tokenizer("a", add_special_tokens=False)["input_ids"]  # a tokenizer may drop a blank at the beginning
    start = len(tokenizer.decode(before))
    return {str(each): tokenizer.decode([*before, each])[start:] for each in sorted(set(token_ids))}


def _all(rows: Iterable[Sequence[int]]) -> set[int]:
    return {token_id for row in rows for token_id in row}
