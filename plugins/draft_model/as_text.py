"""Text between two tokenizers: what the draft model reads of a request, and what the target is offered of its draft.

The universal assisted generation of transformers does the same. A draft is one-hot whatever was drawn, so verification
is lossless at every temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LOOKBEHIND = 10
"""Tokens before a text that are encoded with it: what a tokenizer does at the beginning of a text stays there."""
_INCOMPLETE = "\ufffd"
_GUARD = "\n"
"""Begins a text where the tokens before it would merge with it."""


class Crossing:
    """From one tokenizer's ids to the other's. Special tokens do not cross, but the end of a text does."""

    def __init__(self, own: Any, target: Any, own_size: int, target_size: int) -> None:
        """own: the draft model's. own_size, target_size: of the models' tables; ids beyond them are left out."""
        self._own, self._target = own, target
        self._own_size, self._target_size = own_size, target_size
        begin = own.bos_token_id
        self._begin = [begin] if begin is not None and own("")["input_ids"][:1] == [begin] else []

    def context(self, token_ids: Sequence[int]) -> list[int]:
        """What the draft model reads of these target ids."""
        pieces = _encode(self._own, _text(self._target, token_ids))
        return self._begin + [each for each in pieces if each < self._own_size]

    def draft(self, context: Sequence[int], drawn: Sequence[int], before: Sequence[int]) -> list[int]:
        """Target ids of what was drawn after `context`, both the draft model's; `before`: the request's target ids."""
        end = self._own.eos_token_id
        has_ended = end in drawn
        standing = list(drawn[: drawn.index(end)]) if has_ended else list(drawn)
        known = context[-_LOOKBEHIND:]
        read, whole = _text(self._own, known), _text(self._own, [*known, *standing])
        drafted = self._after(before[-_LOOKBEHIND:], whole[len(read) :]) if whole.startswith(read) else []
        ends = [self._target.eos_token_id] if has_ended and self._target.eos_token_id is not None else []
        return [each for each in [*drafted, *ends] if each < self._target_size]

    def _after(self, before: Sequence[int], text: str) -> list[int]:
        """The ids of a text that follows others."""
        text = text.partition(_INCOMPLETE)[0]
        for lead in (_text(self._target, before), _GUARD):
            ids, both = _encode(self._target, lead), _encode(self._target, lead + text)
            if both[: len(ids)] == ids:
                return both[len(ids) :]
        return []


def _text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
