"""Text between two tokenizers: what the draft model reads of a request, and what the target is offered of its draft.

The universal assisted generation of transformers does the same. A draft is one-hot whatever was drawn, so verification
is lossless at every temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_LOOKBEHIND = 10
"""Tokens before a text that are encoded with it: what a tokenizer does at the beginning of a text stays there."""
_UNSETTLED = 64
"""Tokens at the end of a growing text that are encoded in every step."""
_INCOMPLETE = "\ufffd"
_GUARD = "\n"
"""Begins a text where the tokens before it would merge with it."""


@dataclass
class Settled:
    """The beginning of a growing text, whose ids stay as they are."""

    count: int = 0  # target tokens
    ids: list[int] = field(default_factory=list)  # the draft model's, of their text


class Crossing:
    """Translates ids of one tokenizer to ids of the other. Of special tokens only the end of a text is translated."""

    def __init__(self, own: Any, target: Any, own_size: int, target_size: int) -> None:
        """own: the draft model's. own_size, target_size: of the models' tables; ids beyond them are left out."""
        self._own, self._target = own, target
        self._own_size, self._target_size = own_size, target_size
        begin = own.bos_token_id
        self._begin = [begin] if begin is not None and own("")["input_ids"][:1] == [begin] else []

    def context(self, token_ids: Sequence[int], settled: Settled | None = None) -> list[int]:
        """What the draft model reads of these target ids.

        settled: of their beginning, from earlier calls; what can be settled now is added. None: all are encoded.
        """
        settled = settled or Settled()
        behind = self._behind(settled.count, token_ids)
        if behind is None:
            settled.count, settled.ids = 0, []
            behind = _encode(self._own, _text(self._target, token_ids))
        pieces = settled.ids + behind
        if len(token_ids) > settled.count + 2 * _UNSETTLED:
            self._settle(settled, token_ids, behind)
        return self._begin + [each for each in pieces if each < self._own_size]

    def _behind(self, count: int, token_ids: Sequence[int]) -> list[int] | None:
        """The draft model's ids behind so many target tokens. None: they merge with those before."""
        first = max(count - _LOOKBEHIND, 0)
        before, both = (_text(self._target, each) for each in (token_ids[first:count], token_ids[first:]))
        return _following(self._own, before, both) if both.startswith(before) else None

    def _settle(self, settled: Settled, token_ids: Sequence[int], behind: Sequence[int]) -> None:
        """Settle up to a word near the end that begins with its space: tokenizers part texts there, whatever follows.

        behind: the draft model's ids of all that is not settled. Both parts have to give them.
        """
        for end in range(len(token_ids) - _UNSETTLED, len(token_ids) - 2 * _UNSETTLED, -1):
            if self._begins_word(token_ids, end):
                front, back = self._behind(settled.count, token_ids[:end]), self._behind(end, token_ids)
                if front is not None and back is not None and [*front, *back] == behind:
                    settled.count, settled.ids = end, [*settled.ids, *front]
                return

    def _begins_word(self, token_ids: Sequence[int], place: int) -> bool:
        before, both = (_text(self._target, token_ids[place - 1 : end]) for end in (place, place + 2))
        word = both[len(before) :]
        return both.startswith(before) and before[-1:].isalnum() and word[:1].isspace() and word[1:2].isalnum()

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
            ids = _following(self._target, lead, lead + text)
            if ids is not None:
                return ids
        return []


def _following(tokenizer: Any, before: str, both: str) -> list[int] | None:
    """The ids of what follows a text. None: its first token would merge with the last one before."""
    known, ids = _encode(tokenizer, before), _encode(tokenizer, both)
    return ids[len(known) :] if ids[: len(known)] == known else None


def _text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
