"""Kept entries in the place of rejected ones, against the definition, in both forms."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.sdk import KeptTokens

COUNTS = st.lists(st.integers(1, 4).flatmap(lambda shown: st.tuples(st.integers(1, shown), st.just(shown))), max_size=4)


def kept_of(counts, *, device_form):
    """Requests that kept the first of so many entries that they computed."""
    shown = [each[1] if device_form else each[0] for each in counts]
    offsets = torch.tensor([0, *shown]).cumsum(0)
    total = int(offsets[-1])
    none = torch.zeros(total, dtype=torch.int64)
    return KeptTokens(
        token_offsets=offsets,
        num_kept=torch.tensor([each[0] for each in counts], dtype=torch.int64),
        kept_start=torch.zeros(len(counts), dtype=torch.int64),
        positions=torch.arange(total),
        token_ids=none,
        next_token_ids=none,
    )


@given(COUNTS, st.booleans())
def test_a_rejected_entry_gives_way_to_the_last_kept_one_of_its_request(counts, device_form):
    kept = kept_of(counts, device_form=device_form)
    places, owners = kept.entries()
    expected, owning = [], []
    for b, (first, stop) in enumerate(zip(kept.token_offsets.tolist(), kept.token_offsets[1:].tolist(), strict=False)):
        last = first + counts[b][0] - 1
        expected += [min(entry, last) for entry in range(first, stop)]
        owning += [b] * (stop - first)
    assert (places.tolist(), owners.tolist()) == (expected, owning)


def test_nothing_is_read_back_from_the_device():
    """A tensor without values can be asked for nothing."""
    with torch.device("meta"):
        meta = [torch.empty(3, dtype=torch.int64), torch.empty(2, dtype=torch.int64), torch.empty(5, dtype=torch.int64)]
    offsets, counts, tokens = meta
    kept = KeptTokens(
        token_offsets=offsets,
        num_kept=counts,
        kept_start=counts,
        positions=tokens,
        token_ids=tokens,
        next_token_ids=tokens,
    )
    places, owners = kept.entries()
    assert (places.shape, owners.shape) == ((5,), (5,))
