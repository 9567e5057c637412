"""Operations of layers as Triton kernels: memory is read once and written once, rounding is that of modelling code."""

# ruff: noqa: ANN001, ANN201, PLR0913
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two

WIDTH = 1024  # columns of a program of `silu_mul_kernel`
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}  # an fma would round once where modelling code rounds twice


@triton.jit
def rms_norm_kernel(
    rows_ptr,
    token_stride,
    head_stride,
    added_ptr,
    total_ptr,
    gain_ptr,
    output_ptr,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Grid [rows]: HEADS rows a token. With ADDED the sum with contiguous `added` is written to `total` as well."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_SIZE)
    there = columns < SIZE
    start = row // HEADS * token_stride + row % HEADS * head_stride
    values = tl.load(rows_ptr + start + columns, mask=there, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(added_ptr + row * SIZE + columns, mask=there, other=0.0).to(tl.float32)
        rounded = values.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + columns, rounded, mask=there)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normal = (values * inverse).to(gain_ptr.dtype.element_ty).to(tl.float32)
    gain = tl.load(gain_ptr + columns, mask=there, other=0.0)
    scaled = (normal * gain.to(tl.float32)).to(gain.dtype)
    tl.store(output_ptr + row * SIZE + columns, scaled.to(output_ptr.dtype.element_ty), mask=there)


@triton.jit
def silu_mul_kernel(gate_ptr, gate_stride, up_ptr, up_stride, output_ptr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Grid [rows, parts of a row]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = columns < SIZE
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=there, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=there, other=0.0)
    wide = gate.to(tl.float32)
    activated = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype)
    product = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(output_ptr + row * SIZE + columns, product, mask=there)


@triton.jit
def turn(head_ptr, turned_ptr, cos_ptr, sin_ptr, DIM: tl.constexpr, PADDED_HALF: tl.constexpr):
    """One head of one token; every product is rounded, as modelling code rounds it."""
    HALF: tl.constexpr = DIM // 2
    columns = tl.arange(0, PADDED_HALF)
    there = columns < HALF
    first = tl.load(head_ptr + columns, mask=there, other=0.0)
    second = tl.load(head_ptr + HALF + columns, mask=there, other=0.0)
    left = rounded_product(first, cos_ptr + columns, there) - rounded_product(second, sin_ptr + columns, there)
    tl.store(turned_ptr + columns, left.to(turned_ptr.dtype.element_ty), mask=there)
    right = rounded_product(second, cos_ptr + HALF + columns, there)
    right += rounded_product(first, sin_ptr + HALF + columns, there)
    tl.store(turned_ptr + HALF + columns, right.to(turned_ptr.dtype.element_ty), mask=there)


@triton.jit
def rounded_product(values, factor_ptr, there):
    """In the dtype of the values, as fp32."""
    factor = tl.load(factor_ptr, mask=there, other=0.0)
    return (values.to(tl.float32) * factor.to(tl.float32)).to(values.dtype).to(tl.float32)


@triton.jit
def rotate_kernel(
    query_ptr,
    query_token_stride,
    query_head_stride,
    keys_ptr,
    keys_token_stride,
    keys_head_stride,
    values_ptr,
    values_token_stride,
    values_head_stride,
    cos_ptr,
    cos_stride,
    sin_ptr,
    sin_stride,
    slots_ptr,
    turned_query_ptr,
    turned_keys_ptr,
    turned_keys_stride,
    stored_values_ptr,
    stored_values_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    STORED: tl.constexpr,
):
    """Grid [N, HEADS + KV_HEADS], and KV_HEADS more with STORED, where keys and values go to the tokens' slots."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token) if STORED else token
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    if head < HEADS:
        source = query_ptr + token * query_token_stride + head * query_head_stride
        turn(source, turned_query_ptr + (token * HEADS + head) * DIM, cos_ptr, sin_ptr, DIM, PADDED_HALF)
    elif head < HEADS + KV_HEADS:
        kv_head = head - HEADS
        source = keys_ptr + token * keys_token_stride + kv_head * keys_head_stride
        turn(source, turned_keys_ptr + slot * turned_keys_stride + kv_head * DIM, cos_ptr, sin_ptr, DIM, PADDED_HALF)
    elif STORED:
        kv_head = head - HEADS - KV_HEADS
        columns = tl.arange(0, PADDED_VALUE_DIM)
        there = columns < VALUE_DIM
        source = values_ptr + token * values_token_stride + kv_head * values_head_stride
        value = tl.load(source + columns, mask=there, other=0.0)
        tl.store(stored_values_ptr + slot * stored_values_stride + kv_head * VALUE_DIM + columns, value, mask=there)


def rms_norm(rows: Tensor, gain: Tensor, eps: float) -> Tensor:
    """See `naive.rms_norm`."""
    by_head = _by_head(rows)
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    _normalize(by_head, None, output, output, gain, eps)
    return output


def add_rms_norm(first: Tensor, second: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `naive.add_rms_norm`."""
    total, output = (torch.empty(first.shape, dtype=first.dtype, device=first.device) for _ in range(2))
    _normalize(_by_head(first), second.contiguous(), total, output, gain, eps)
    return total, output


def _by_head(rows: Tensor) -> Tensor:
    """[..., H] as [tokens, heads, H], a view of a joined product too."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows.flatten(0, -3) if rows.dim() > 3 else rows.reshape(-1, 1, rows.shape[-1])


def _normalize(rows: Tensor, added: Tensor | None, total: Tensor, output: Tensor, gain: Tensor, eps: float) -> None:
    tokens, heads, size = rows.shape
    padded_size = next_power_of_two(size)
    rms_norm_kernel[(tokens * heads,)](
        rows,
        rows.stride(0),
        rows.stride(1),
        rows if added is None else added,
        total,
        gain,
        output,
        eps,
        HEADS=heads,
        SIZE=size,
        PADDED_SIZE=padded_size,
        ADDED=added is not None,
        num_warps=warps_of(padded_size),
        **OPTIONS,
    )


def warps_of(padded_size: int) -> int:
    """Of a program that holds so many numbers: at most 16 of them a thread, where there are threads for it."""
    return min(16, max(1, padded_size // 512))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `naive.silu_mul`."""
    size = gate.shape[-1]
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = gate.reshape(-1, size), up.reshape(-1, size)
    silu_mul_kernel[(len(gate), -(-size // WIDTH))](
        gate, gate.stride(0), up, up.stride(0), output, SIZE=size, WIDTH=WIDTH, num_warps=4, **OPTIONS
    )
    return output


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `naive.rotate`."""
    turned = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    return _rotate(query, keys, keys, cos, sin, None, turned, turned), turned


def rotate_and_store(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
) -> Tensor:
    """See `naive.rotate_and_store`."""
    return _rotate(query, keys, values, cos, sin, slots, stored_keys, stored_values)


def _rotate(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor | None,
    turned_keys: Tensor,
    stored_values: Tensor,
) -> Tensor:
    query, keys, values, cos, sin = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values, cos, sin)
    )
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, value_dim = keys.shape[1], values.shape[2]
    turned_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotate_kernel[(num_tokens, num_heads + num_kv_heads * (1 if slots is None else 2))](
        query,
        *query.stride()[:2],
        keys,
        *keys.stride()[:2],
        values,
        *values.stride()[:2],
        cos,
        cos.stride(0),
        sin,
        sin.stride(0),
        query if slots is None else slots,
        turned_query,
        turned_keys,
        turned_keys.stride(0),
        stored_values,
        stored_values.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        PADDED_HALF=next_power_of_two(dim // 2),
        PADDED_VALUE_DIM=next_power_of_two(value_dim),
        STORED=slots is not None,
        num_warps=1,
        **OPTIONS,
    )
    return turned_query
