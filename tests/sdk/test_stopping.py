"""Drafts that end early: they begin like whole ones, and no other row changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from specdec.sdk.model_proposer import DrawRule
from specdec.sdk.model_proposer.stopping import StoppingRule

B, V, K, M = 5, 24, 4, 6
LENGTHS = [4, 1, 2, 3, 1]


@dataclass
class ByLength:
    """Ends the rows whose first confidence is known here after so many tokens."""

    lengths: dict[float, int]

    def goes_on(self, confidence: Sequence[float]) -> bool:
        return len(confidence) < self.lengths[confidence[0]]


def drawn(drawing, logits):
    """The result, and the rows of each draw."""
    rows, drawn_rows = torch.arange(B), []
    for index in range(K):
        (rows,) = drawing.going_on(rows) if index else (rows,)
        if not len(rows):
            break
        drawn_rows.append(rows.tolist())
        drawing.draw(logits[rows, index])
    return drawing.result(), drawn_rows


@pytest.mark.parametrize("form", ["one_hot", "sparse", "dense"])
@pytest.mark.parametrize("lengths", [LENGTHS, [2] * B, [K] * B], ids=["ragged", "together", "whole"])
def test_rows_that_stop_are_drawn_no_more_and_the_others_do_not_change(form, lengths):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(B, K, V, generator=generator)
    numbers = torch.rand(B, K + 1, dtype=torch.float64, generator=generator)  # the last: temperatures
    columns = () if form == "one_hot" else ("temperature",)
    rule = DrawRule(form, columns, M, None, confident=True)
    given = () if form == "one_hot" else (numbers,)
    (whole, *parts), _ = drawn(rule.drawing(given, K), logits)
    stop = ByLength(dict(zip(parts[-1][:, 0].tolist(), lengths, strict=True)))
    (cut, *cut_parts), rows = drawn(StoppingRule(**vars(rule), stop=stop).drawing(given, K), logits)
    assert rows == [[b for b in range(B) if lengths[b] > index] for index in range(max(lengths))]
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    assert torch.equal(cut, whole[:, : max(lengths)].masked_fill(~inside, -1))
    for each, all_of_it in zip(cut_parts, parts, strict=True):
        assert torch.equal(each[inside], all_of_it[:, : max(lengths)][inside])
