"""The properties of `test_properties` hold of the interpreted kernels too.

The unmarked test takes two examples of each of four properties, the marked one many of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.core.rejection import DistributionKind

from . import test_properties as properties
from .batches import ALL_KINDS, Batch, Shape, random_batch
from .interpreted import quiet, with_tile

SHAPES = st.builds(
    Shape,
    num_requests=st.integers(1, 3),
    num_drafts=st.integers(0, 2),
    vocab_size=st.sampled_from([1, 2, 7, 17]),
    kinds=st.sampled_from(
        [ALL_KINDS, (DistributionKind.ONE_HOT,), (DistributionKind.DENSE_PROBS, DistributionKind.SPARSE)]
    ),
    filters=st.booleans(),
    greedy=st.sampled_from([0.0, 0.3]),
    mapped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


def through_kernels(seed: int, shape: Shape, tile: int) -> Batch:
    return replace(random_batch(seed, shape), backend=with_tile(tile))


BATCHES = st.builds(through_kernels, st.integers(0, 2**31), SHAPES, st.sampled_from([4, 32]))
SLICE = [
    properties.test_output_is_accepted_drafts_then_one_token_then_padding,
    properties.test_every_emitted_token_has_positive_probability,
    properties.test_inputs_are_not_modified,
]
REST = [
    properties.test_padding_and_poison_beyond_the_drafts_change_no_bit,
    properties.test_row_stride_offset_and_extra_columns_change_no_token,
    properties.test_host_facts_change_no_token,
    properties.test_distributions_tagged_one_hot_equal_no_distributions,
    properties.test_row_tagged_with_an_absent_distribution_is_one_hot,
    properties.test_top_k_of_one_and_no_temperature_are_greedy_where_the_maximum_is_unique,
]
MORE_GIVEN = {
    properties.test_order_and_company_of_requests_change_no_bit: st.randoms(use_true_random=False),
    properties.test_lower_accept_uniforms_never_accept_fewer: st.integers(1, 40),
}


def check(holds: Callable[..., None], num_examples: int) -> None:
    more = MORE_GIVEN.get(holds)
    strategies = (BATCHES,) if more is None else (BATCHES, more)
    slow = settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    slow(given(*strategies)(holds.hypothesis.inner_test))()


@quiet
@pytest.mark.parametrize("holds", SLICE, ids=lambda holds: holds.__name__)
def test_property_holds_of_the_kernels(holds: Callable[..., None]) -> None:
    check(holds, 2)


@quiet
@pytest.mark.full
@pytest.mark.parametrize("holds", [*SLICE, *REST, *MORE_GIVEN], ids=lambda holds: holds.__name__)
def test_property_holds_of_the_kernels_in_many_examples(holds: Callable[..., None]) -> None:
    check(holds, 10)
