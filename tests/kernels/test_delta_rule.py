"""The gated delta rule in C gives what modelling code gives token by token."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from specdec.core.kernels.cpu.layers import delta_rule
from specdec.core.kernels.cpu.native.kernels import NativeKernels

HEADS = 3


@pytest.fixture(scope="module")
def rule():
    return partial(delta_rule, NativeKernels.load())


def inputs(count, length, key_dim, value_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    shapes = [(count, length, HEADS, each) for each in (key_dim, key_dim, value_dim)] + 2 * [(count, length, HEADS)]
    query, key, value, g, beta = (torch.randn(each, generator=generator).to(dtype) for each in shapes)
    state = torch.randn(count, HEADS, key_dim, value_dim, generator=generator)
    return (query, key, value), {"g": -g.abs(), "beta": beta.sigmoid()}, state


def expected(given, named, state, **options):
    by_token = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    return by_token(*given, **named, initial_state=state, output_final_state=True, **options)


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1, 32, 32), (2, 5, 24, 40), (3, 16, 8, 129)])
def test_outputs_and_state_are_those_of_modelling_code(rule, sizes, normalizes):
    given, named, state = inputs(*sizes)
    given = given if normalizes else (given[0], 0.1 * given[1], given[2])
    options = {"use_qk_l2norm_in_kernel": normalizes}
    outputs, final = expected(given, named, state, **options)
    own = state.clone()
    found, kept = rule(*given, **named, initial_state=own, output_final_state=True, **options)
    torch.testing.assert_close(found, outputs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kept, final, atol=1e-5, rtol=1e-4)
    assert kept is own


def test_a_head_of_queries_and_keys_serves_adjacent_heads_of_values(rule):
    """Modelling code repeats these heads before the call, up to transformers 5.19, or leaves that to the operator."""
    (query, key, value), named, state = inputs(2, 5, 24, 40)
    query, key = query[:, :, :1], key[:, :, :1]
    repeated = (query.repeat_interleave(HEADS, dim=2), key.repeat_interleave(HEADS, dim=2), value)
    outputs, final = expected(repeated, named, state)
    found, kept = rule(query, key, value, **named, initial_state=state.clone())
    torch.testing.assert_close(found, outputs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kept, final, atol=1e-5, rtol=1e-4)


def test_a_text_begins_with_an_empty_state_of_the_values_heads(rule):
    given, named, _ = inputs(1, 4, 16, 16)
    fewer = given[0][:, :, :1], given[1][:, :, :1], given[2]
    assert rule(*fewer, **named)[1].shape == (1, HEADS, 16, 16)


def test_a_text_begins_with_an_empty_state(rule):
    given, named, _ = inputs(2, 4, 16, 16)
    outputs, final = expected(given, named, None, use_qk_l2norm_in_kernel=True)
    found, kept = rule(*given, **named, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(found, outputs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kept, final, atol=1e-5, rtol=1e-4)


def test_bfloat16_is_computed_in_fp32(rule):
    given, named, state = inputs(1, 4, 16, 16, torch.bfloat16)
    outputs, _ = expected(given, named, state, use_qk_l2norm_in_kernel=True)
    found, _ = rule(*given, **named, initial_state=state.clone(), use_qk_l2norm_in_kernel=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, outputs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("broken", ["g", "beta"])
def test_sizes_that_do_not_fit_are_refused(rule, broken):
    given, named, state = inputs(1, 4, 16, 16)
    named[broken] = named[broken][:, :3]
    with pytest.raises(RuntimeError, match="fit together"):
        rule(*given, **named, initial_state=state)
