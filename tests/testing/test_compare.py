"""What the kit counts as the same draft distribution."""

from __future__ import annotations

import pytest
import torch

from specdec.testing.compare import are_alike

WHOLE = torch.tensor([0.6, 0.3, 0.099, 0.001, 0.0], dtype=torch.float64)
OTHER_LAST = torch.tensor([0.6, 0.3, 0.099, 0.0, 0.001], dtype=torch.float64)


def without(*places: int) -> torch.Tensor:
    """The distribution without some tokens, as a filter leaves it."""
    left = WHOLE.clone()
    left[list(places)] = 0
    return left / left.sum()


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (WHOLE + 1e-5, True),
        (without(3), True),  # where the cut lies, rounding decides
        (OTHER_LAST, True),  # two are as likely, and the likeliest few are reported
        (without(2), False),
        (without(2, 3), False),
        (WHOLE.roll(1), False),
        (torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64), False),
        (torch.full((5,), torch.nan, dtype=torch.float64), False),
    ],
    ids=[
        "rounding",
        "the last token",
        "another last token",
        "another token",
        "two tokens",
        "other places",
        "one token",
        "no numbers",
    ],
)
def test_distributions_are_alike_up_to_rounding_and_a_filters_last_token(other, same):
    assert are_alike(WHOLE, other) == are_alike(other, WHOLE) == same


def test_distributions_of_one_token_each_are_not_alike():
    first, second = torch.eye(3, dtype=torch.float64)[:2]
    assert not are_alike(first, second)
    assert are_alike(first, first)


def test_a_likely_token_that_one_of_them_lacks_is_no_matter_of_rounding():
    filtered = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert not are_alike(torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64), filtered)
    assert not are_alike(torch.tensor([0.95, 0.05, 0.0], dtype=torch.float64), filtered)
