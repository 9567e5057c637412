"""A draft model that reads the text of its requests in its own tokens, on the target's blocks.

Its text has another number of tokens than the target's. So its rows of draft KV are its own count from 0 on, and what
a step writes over is found by comparing: the longest common beginning of what was read and what is to be read stays.
A text that has more tokens than its blocks have room for loses its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from specdec.sdk import Draft, StepView
from specdec.sdk.extensions import DraftKVStore
from specdec.sdk.model_proposer import DraftInputs

from .as_text import Crossing, Settled

SPARE_ROWS = 64
"""Positions of each request for texts that have more tokens here than the target counts."""
_MOST_INPUTS = 2048  # of a request in one pass
Run = Callable[[DraftInputs], Tensor]
"""The model's logits [b, D] of its own ids."""


@dataclass
class _Text:
    """What the draft KV of a row holds."""

    generation: int
    first: int = 0  # the target token that it begins with
    ids: list[int] = field(default_factory=list)
    settled: Settled = field(default_factory=Settled)


@dataclass(frozen=True)
class _Reading:
    """A request's share of a draft."""

    text: _Text
    row: int
    ids: list[int]  # all that the model is to have read
    num_known: int  # of them it has read
    budget: int
    target_ids: list[int]


_Part = tuple[int, int, Sequence[int]]
"""What one pass reads of a request: its row, the position of the first id, and the ids."""


class TextDrafter:
    """Drafts greedily, one token after the other."""

    def __init__(
        self, crossing: Crossing, kv: DraftKVStore, run: Run, lookahead: int, longest: int, device: torch.device
    ) -> None:
        """lookahead: of the draft KV. longest: the most tokens that the model serves."""
        self._crossing, self._kv, self._run = crossing, kv, run
        self._lookahead, self._longest, self._device = lookahead, longest, device
        self._texts: dict[int, _Text] = {}

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        readings = self._readings(step)
        drafts: list[list[int]] = [[] for _ in range(len(step))]
        if readings:
            drawn = self._drawn(list(readings.values()))
            for (place, each), ids in zip(readings.items(), drawn, strict=True):
                drafts[place] = self._crossing.draft(each.ids, ids, each.target_ids)[: each.budget]
        return Draft.from_lists(drafts, step.width)

    def _readings(self, step: StepView) -> dict[int, _Reading]:
        """The readings of requests that want drafts and have a text, by place in the step."""
        assert step.history is not None, "declared"
        facts = zip(step.slots.tolist(), step.generation.tolist(), step.budget.tolist(), strict=True)
        readings = {}
        for place, (row, generation, budget) in enumerate(facts):
            if budget > 0:
                reading = self._reading(row, generation, step.history.token_ids(place), budget)
                if reading.ids:
                    readings[place] = reading
        return readings

    def _reading(self, row: int, generation: int, target_ids: list[int], budget: int) -> _Reading:
        text = self._texts.get(row)
        if text is None or text.generation != generation:
            text = self._texts[row] = _Text(generation)
        most = min(len(target_ids) + self._lookahead, self._longest) - budget + 1
        ids = self._crossing.context(target_ids[text.first :], text.settled)
        while len(ids) > most:  # a quarter of the room is left, so that the text goes on for a while
            num_left = (len(target_ids) - text.first) * 3 * most // (4 * len(ids))
            text.first, text.settled = len(target_ids) - num_left, Settled()
            ids = self._crossing.context(target_ids[text.first :], text.settled)
        num_known = min(_common(text.ids, ids), max(len(ids) - 1, 0))
        return _Reading(text, row, ids, num_known, budget, target_ids)

    def _drawn(self, readings: Sequence[_Reading]) -> list[list[int]]:
        """Draft as many tokens for each reading as its budget."""
        drawn = [[token_id] for token_id in self._read(readings)]
        for index in range(1, max(each.budget for each in readings)):
            places = [place for place, each in enumerate(readings) if index < each.budget]
            parts = [(readings[place].row, len(readings[place].ids) + index - 1, drawn[place][-1:]) for place in places]
            for place, token_id in zip(places, self._pass(parts), strict=True):
                drawn[place].append(token_id)
        for each, ids in zip(readings, drawn, strict=True):
            each.text.ids = [*each.ids, *ids[:-1]]
        return drawn

    def _read(self, readings: Sequence[_Reading]) -> list[int]:
        """The likeliest token after each text, of which the model reads what is new."""
        parts = [(each.row, each.num_known, each.ids[each.num_known :]) for each in readings]
        while long := [part for part in parts if len(part[2]) > _MOST_INPUTS]:
            self._pass([(row, start, ids[:_MOST_INPUTS]) for row, start, ids in long])
            parts = [
                (row, start + _MOST_INPUTS, ids[_MOST_INPUTS:]) if len(ids) > _MOST_INPUTS else (row, start, ids)
                for row, start, ids in parts
            ]
        return self._pass(parts)

    def _pass(self, parts: Sequence[_Part]) -> list[int]:
        """The likeliest token after the last input of each."""
        rows, starts, inputs = zip(*parts, strict=True)
        cu_queries = self._tensor([0, *accumulate(map(len, inputs))])
        attention = self._kv.attention(self._tensor(rows), self._tensor(starts), cu_queries)
        positions = self._tensor([start + i for _, start, ids in parts for i in range(len(ids))])
        token_ids = self._tensor([token_id for ids in inputs for token_id in ids])
        logits = self._run(DraftInputs(token_ids, positions, None, cu_queries[1:] - 1, attention))
        likeliest: list[int] = logits.argmax(dim=-1).tolist()
        return likeliest

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _common(known: Sequence[int], wanted: Sequence[int]) -> int:
    """The length of their common beginning."""
    pairs = zip(known, wanted, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(known), len(wanted)))
