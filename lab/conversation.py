"""Conversations of several turns: what is asked next, after what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.core.engine.engine import Engine
from specdec.core.host import parts_of
from specdec.core.request.chat import encode_chat
from specdec.core.request.prompts import encode

from .dataset_files import PromptRow

BETWEEN_TURNS = "\n\n"


@dataclass(frozen=True)
class Exchange:
    """One turn that was asked and answered."""

    prompt_token_ids: tuple[int, ...]
    reply_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """How texts become token ids of a target, whoever runs it."""

    tokenizer: Any  # None: it has none
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, engine: Engine) -> Texts:
        """The texts of our engine's target."""
        return cls(engine.tokenizer, parts_of(engine).model.eos_token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens. Returns "" where there is no tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def turn(self, row: PromptRow, before: Sequence[Exchange], *, chat: bool) -> list[int]:
        """Token ids of the turn after those `before`. Raises RequestError.

        chat: in the tokenizer's template, replies included. Otherwise the text goes on behind the last reply. Rows of
        token ids and of messages have one turn and are taken as they are.
        """
        if row.token_ids:
            return list(row.token_ids)
        if row.messages:
            return encode_chat(self.tokenizer, row.messages)
        if chat:
            messages = []
            for asked, exchange in zip(row.turns, before, strict=False):
                reply = self.decode(exchange.reply_token_ids)
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
            return encode_chat(self.tokenizer, [*messages, {"role": "user", "content": row.turns[len(before)]}])
        if not before:
            return encode(self.tokenizer, row.prompt)
        *_, last = before
        reply_ids = [token_id for token_id in last.reply_token_ids if token_id not in self.eos_token_ids]
        asked_ids = self.tokenizer(BETWEEN_TURNS + row.turns[len(before)], add_special_tokens=False)["input_ids"]
        return [*last.prompt_token_ids, *reply_ids, *asked_ids]
