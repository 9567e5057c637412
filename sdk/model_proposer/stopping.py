"""Drawing for ever fewer rows: each stops where the engine's rule says that another token of it does not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..types import PADDING_TOKEN_ID, Draft, StopRule
from .sampling import Drawing, DrawRule


@dataclass(frozen=True)
class StoppingRule(DrawRule):
    """A rule whose drawings stop row by row. It waits for each token, so nothing of it is recorded."""

    stop: StopRule = field(kw_only=True)

    def drawing(self, numbers: Sequence[Tensor], num_tokens: int) -> StoppingDrawing:
        """See `DrawRule`."""
        return StoppingDrawing(self, numbers, num_tokens)


class StoppingDrawing(Drawing):
    """Its `draw` takes logits of the rows that go on.

    A row stops before its next token is drawn, by the confidences of those before it. So no token's own draw decides
    whether it is in the draft.
    """

    def __init__(self, rule: StoppingRule, numbers: Sequence[Tensor], num_tokens: int) -> None:
        super().__init__(rule, {}, ())
        self._stop, self._numbers, self._num_tokens = rule.stop, numbers, num_tokens
        self._rows: Tensor | None = None  # [b'], the places of the rows that go on. None: all of them
        self._told: list[list[float]] | None = None  # the confidences of their tokens
        self._tokens: list[tuple[Tensor | None, tuple[Tensor, ...]]] = []  # the rows of each, and its parts

    def draw(self, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """The next token [b'] of the rows that go on, from their logits [b', D]. See `Drawing.draw`."""
        drawing = DrawRule.drawing(self._rule, self._next_numbers(), 1)
        token_ids = drawing.draw(logits, confidence)
        parts = drawing.result()
        self._tokens.append((self._rows, parts))
        told = parts[-1].tolist()  # [b', 1]
        before = self._told
        self._told = told if before is None else [[*row, *new] for row, new in zip(before, told, strict=True)]
        return token_ids

    def going_on(self, *of_rows: Tensor) -> Sequence[Tensor]:
        """See `Drawing.going_on`. of_rows: tensors of the rows that drew last."""
        assert self._told is not None, "the first token is drawn in every row"
        places = [place for place, told in enumerate(self._told) if self._stop.goes_on(told)]
        if len(places) == len(self._told):
            return of_rows
        self._told = [self._told[place] for place in places]
        left = torch.tensor(places, dtype=torch.int64)
        self._rows = left if self._rows is None else self._rows[left]
        return [each[left] for each in of_rows]

    def result(self) -> tuple[Tensor, ...]:
        """See `DrawRule`. Token ids are -1 behind the last token of a row."""
        return tuple(self._placed(index) for index in range(len(self._tokens[0][1])))

    def _placed(self, index: int) -> Tensor:
        """One part of all tokens, [b, n, ...]."""
        first = self._tokens[0][1][index]  # every row has a first token
        padding = 0 if index else PADDING_TOKEN_ID
        whole = first.new_full((len(first), len(self._tokens), *first.shape[2:]), padding)
        for token, (rows, parts) in enumerate(self._tokens):
            whole[slice(None) if rows is None else rows, token] = parts[index][:, 0]
        return whole

    def _next_numbers(self) -> list[Tensor]:
        """Those of one token, in the rows that go on."""
        index, first = len(self._tokens), self._num_tokens
        rows = slice(None) if self._rows is None else self._rows
        return [torch.cat([each[rows, index : index + 1], each[rows, first:]], dim=1) for each in self._numbers]


def shortened(draft: Draft) -> Draft:
    """The draft with each row cut before its first -1."""
    return replace(draft, lengths=(draft.token_ids != PADDING_TOKEN_ID).sum(dim=1))
