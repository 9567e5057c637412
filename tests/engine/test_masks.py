"""What a model's own mask functions say is found without its configuration."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from specdec.core.model.masks import Limits, limits_of_mask

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("size", [1, 2, 8, 4096])
def test_windows_and_chunks_are_told_apart(size):
    sliding, chunked = sliding_window_causal_mask_function(size), chunked_causal_mask_function(size, NO_PADDING)
    found = [limits_of_mask(mask_function=each, device="cpu", local_size=size) for each in (sliding, chunked)]
    assert found[0] == Limits(window=size)
    assert found[1] == (Limits(chunk=size) if size > 1 else Limits(window=1))  # of one key they are the same


def test_a_causal_mask_has_no_limits():
    assert limits_of_mask(mask_function=causal_mask_function, device="cpu") == Limits()


def test_other_masks_are_not_served():
    first_tokens = or_masks(causal_mask_function, lambda batch, head, query, key: key < 2)
    for other in (bidirectional_mask_function, first_tokens):
        assert not limits_of_mask(mask_function=other, device="cpu").is_served
