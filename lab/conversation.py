"""Conversations of several turns: what is asked next, after what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.engine.engine import Engine
from specdec.core.host import EngineView

from .dataset_files import PromptRow

BETWEEN_TURNS = "\n\n"


@dataclass(frozen=True)
class Exchange:
    """One turn that was asked and answered."""

    prompt_token_ids: tuple[int, ...]
    reply_token_ids: tuple[int, ...]


def encode(engine: Engine, prompt: str, chat: bool) -> list[int]:
    """A prompt's token ids, as they are or as the first message of a conversation. Raises RequestError."""
    return engine.encode_chat([{"role": "user", "content": prompt}]) if chat else engine.encode(prompt)


def turn_id(row: PromptRow, turn: int) -> str:
    """The id of a turn's request: the prompt's own for the first, with the number behind it for others."""
    return row.prompt_id if turn == 0 else f"{row.prompt_id}/{turn + 1}"


def turn_prompt(engine: Engine, row: PromptRow, before: Sequence[Exchange], *, chat: bool) -> list[int]:
    """Token ids of the turn after those `before`. Raises RequestError.

    chat: in the tokenizer's template, replies included. Otherwise the text goes on behind the last reply.
    """
    if not before:
        return encode(engine, row.prompt, chat)
    if chat:
        messages = []
        for asked, exchange in zip(row.turns, before, strict=False):
            reply = engine.tokenizer.decode(list(exchange.reply_token_ids), skip_special_tokens=True)
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        return engine.encode_chat([*messages, {"role": "user", "content": row.turns[len(before)]}])
    *_, last = before
    ends = EngineView.of(engine).eos_token_ids
    reply = [token_id for token_id in last.reply_token_ids if token_id not in ends]
    asked = engine.tokenizer(BETWEEN_TURNS + row.turns[len(before)], add_special_tokens=False)["input_ids"]
    return [*last.prompt_token_ids, *reply, *asked]
