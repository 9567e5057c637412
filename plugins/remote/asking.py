"""How much of a step fits in one question. What does not is left for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.sdk.wire import MAX_MESSAGE_BYTES, MOST_ROWS, MOST_TOKENS, Row

from .texts import Text

TOKEN_BYTES = 5
"""The most that MessagePack takes for a token."""
NUMBER_BYTES = 9
"""The most for any number."""
ROW_NUMBERS = 16
"""Numbers of a row, of its drawing and its states, and the heads of the arrays around them."""
ENVELOPE_BYTES = 1024


@dataclass(eq=False)
class Rows:
    """The rows of a question. `num_uniforms`: of each, where drafts are drawn. `whole`: a row may not be cut."""

    num_uniforms: int
    whole: bool
    rows: list[Row] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # in the step, of each row
    texts: dict[str, Text] = field(default_factory=dict)  # by their names there
    left: int = MAX_MESSAGE_BYTES - ENVELOPE_BYTES

    def room_for(self, text: Text, count: int) -> int:
        """How many of so many tokens a row of this text may have. 0: it waits. Less than all: nothing else fits."""
        room = min((self.left - self._fixed(text)) // TOKEN_BYTES, MOST_TOKENS)
        if len(self.rows) >= MOST_ROWS or room <= 0 or (room < count and (self.whole or self.rows)):
            return 0
        return min(room, count)

    def add(self, text: Text, row: Row, place: int) -> None:
        """Take a row that fits."""
        self.rows.append(row)
        self.places.append(place)
        self.texts[text.name] = text
        self.left -= self._fixed(text) + TOKEN_BYTES * len(row.tokens)

    def _fixed(self, text: Text) -> int:
        return len(text.name.encode()) + NUMBER_BYTES * (ROW_NUMBERS + self.num_uniforms)
