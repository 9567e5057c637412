"""What the drafter knows of each request, and what is left of its last answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from specdec.sdk.late_proposer import continued
from specdec.sdk.types import RequestView
from specdec.sdk.wire import (
    FULL,
    MAX_MESSAGE_BYTES,
    MOST_NAME,
    MOST_TEXT,
    MOST_TOKENS,
    UNKNOWN,
    Drafted,
    DrawnDraft,
    End,
    Form,
    Row,
    Start,
    encode,
)

from .as_json import as_json
from .drawn import DrawnFrom

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class Text:
    """One request."""

    name: str = ""  # of the request, in messages
    sent: int = 0  # tokens that the drafter has; 0 means that the request is to be started there
    is_refused: bool = False  # it is not for the drafter: it gets no drafts
    rest: list[int] = field(default_factory=list)  # drafts behind `length` tokens
    drawn_from: DrawnFrom | None = None  # None means that they are one-hot
    length: int = 0
    pause: int = 0  # questions to leave out while the drafter has no slot for it
    next_pause: int = 1
    states: list[Tensor] = field(default_factory=list)  # [n, L*H] each, hidden states that the drafter lacks
    num_states: int = 0  # positions whose states were seen: its first ones, without a gap
    num_handed: int = 0  # of them, those that the drafter has, or had

    @property
    def is_lost(self) -> bool:
        """Whether the drafter lacks states that were handed over: they are not there a second time."""
        return not self.sent and self.num_handed > 0

    def see(self, first: int, states: Tensor) -> bool:
        """The hidden states [n, L*H] of positions from `first` on. At position 0 the text begins anew.

        Returns whether it did so while the drafter held it.
        """
        is_left = first == 0 and self.num_states > 0 and self.sent > 0
        if first == 0 and self.num_states:
            self.states, self.num_states, self.num_handed, self.sent = [], 0, 0, 0
        if first == self.num_states and not (self.is_lost or self.is_refused):
            self.states.append(states.clone())
            self.num_states += len(states)
        return is_left

    def hand_over(self) -> list[Tensor]:
        """Take the states that the drafter lacks."""
        states, self.states, self.num_handed = self.states, [], self.num_states
        return states

    def row(self, tokens: Sequence[int], budget: int, num_drafted: int, num_accepted: int) -> Row:
        """What the drafter lacks: `tokens` behind the first `sent`. Counts are as in `Row`."""
        row = Row(self.name, self.sent, list(tokens), budget, num_drafted, num_accepted)
        self.sent += len(tokens)
        return row

    def take(self, answer: Drafted, figures: Counter[str], form: Form | None = None) -> None:
        """An answer to a question about this request. form: of drawn drafts. Raises ValueError for another one."""
        told = answer.distribution if isinstance(answer, DrawnDraft) else None
        drawn_from = None if told is None else DrawnFrom.read(told, len(answer.tokens), form)
        if answer.state == UNKNOWN:
            self.sent = 0
        elif answer.state == FULL:
            self.sent, self.pause, self.next_pause = 0, self.next_pause, 2 * self.next_pause
            figures["no_slot"] += 1
        elif answer.tokens:
            self.rest, self.length, self.next_pause = answer.tokens, answer.length, 1
            self.drawn_from = drawn_from

    def drafts(self, tokens: Sequence[int], length: int, figures: Counter[str]) -> list[int]:
        """What is left behind `length` tokens. tokens: those behind the first `self.length`.

        Nothing is left of a drawn draft: what was committed since tells of the values that were drawn.
        """
        if self.rest and length != self.length:
            rest = continued(self.rest, tokens, 0) if self.drawn_from is None else []
            figures["rebased" if rest else "dropped"] += 1
            self.rest, self.drawn_from = rest, None
        self.length = length
        return self.rest


class UnsendableError(Exception):
    """A request has something that no message holds. Its text says what."""


def name_of(request_id: str) -> str:
    """What a request is called in messages: as in the engine, or shortly where its id is not for a message."""
    return _short(request_id, MOST_NAME) or "-"


def start_of(request: RequestView[Any], name: str) -> Start:
    """The message that takes a request to the drafter. Raises UnsendableError."""
    try:
        options = "" if request.options is None else json.dumps(as_json(request.options))
    except ValueError as error:
        raise UnsendableError(f"its options are no JSON: {error}") from error
    start = Start(name, list(request.prompt_token_ids), _short(request.namespace, MOST_TEXT), options)
    if len(options) > MOST_TEXT:
        raise UnsendableError(f"its options are {len(options)} characters, and a message holds {MOST_TEXT}")
    count = len(start.prompt)
    if count > MOST_TOKENS or len(encode(start)) > MAX_MESSAGE_BYTES:
        limit = f"{MOST_TOKENS} tokens and {MAX_MESSAGE_BYTES} bytes"
        raise UnsendableError(f"its prompt is {count} tokens, and a message holds {limit}")
    return start


def end_of(request: RequestView[Any], name: str, sent: int) -> End:
    """The message that it ended. sent: tokens that the drafter has, perhaps some too many."""
    if request.end is None:
        return End(name, "abort", sent, [])
    text = [*request.prompt_token_ids, *request.end.output_token_ids]
    start = min(sent, len(text))
    return End(name, request.end.reason, start, text[start:])


def _short(text: str, most: int) -> str:
    """The text, or one that stands for it and for no other: where it is too long, or cannot be written as UTF-8."""
    data = text.encode(errors="surrogatepass")
    if len(text) <= most and data.decode(errors="replace") == text:
        return text
    return f"sha256-{sha256(data).hexdigest()}"
