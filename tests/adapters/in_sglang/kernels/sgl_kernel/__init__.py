"""SGLang's CPU kernels in plain PyTorch, for tests alone: its own have to be built from source and are on no index.

Only what greedy generation and the verification of drafts call on a CPU. Each has the contract of SGLang's kernel of
the same name; anything else raises AttributeError or ImportError where SGLang asks for it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def assign_req_to_token_pool_cpu(
    rows: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, places: Tensor, width: int
) -> None:
    """Write the places of each request's new tokens into its row of the table."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = places[first : first + end - start].to(req_to_token.dtype)
        first += end - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, places: Tensor, width: int
) -> None:
    """Read the places of each request's tokens from its row of the table."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[first : first + end - start] = req_to_token[row, start:end].to(places.dtype)
        first += end - start


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, places: Tensor, accepted: Tensor) -> None:
    """The places of accepted tokens stand in front; accept_index is -1 where nothing was accepted."""
    chosen = places[accept_index.flatten()[accept_index.flatten() >= 0].long()]
    accepted[: len(chosen)] = chosen


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Move rows of every layer's keys and values, all of them read before any is written."""
    moves = [(to, at) for to, at in zip(targets.tolist(), sources.tolist(), strict=True) if to != at]
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + at * stride, stride) for _, at in moves]
        for (to, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(pointer + to * stride, row, stride)


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down each tree along what the target would choose."""
    flat = target_predict.flatten()
    for b in range(len(candidates)):
        last = int(retrive_index[b, 0])
        accept_index[b, 0], node, count = last, 0, 0
        while count + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[b, node])
            while node != -1 and candidates[b, node] != flat[last]:
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = flat[last]
            count, last = count + 1, int(retrive_index[b, node])
            accept_index[b, count] = last
        accept_token_num[b] = count
        predicts[last] = flat[last]


def _unused(*_: object, **__: object) -> None:
    raise NotImplementedError("no draft network runs in these tests")


fill_bonus_tokens_cpu = rotate_input_ids_cpu = build_tree_kernel_efficient_cpu = _unused
assign_draft_cache_locs_contiguous_cpu = build_draft_decode_metadata_cpu = _unused


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Query [Q, Hq, D] over keys and values [L, Hk, D]; mask [Q, L], True where it may look."""
    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _plain(cap: float, cross: bool, window: int, encoder_lens: object, sinks: object) -> None:
    if cap or cross or window > 0 or encoder_lens is not None or sinks is not None:
        raise NotImplementedError("plain causal attention only")


def decode_attention_cpu(
    query, keys, values, k_scale, v_scale, out, k, v, places, attn_logits, req_to_token, rows, lengths, scale, cap,
    cross, window, encoder_lens, sinks,
) -> None:  # fmt: skip
    """One token of each request; its key and value are written first."""
    _plain(cap, cross, window, encoder_lens, sinks)
    if k is not None:
        keys[places] = k.view(len(places), *keys.shape[1:]).to(keys.dtype)
        values[places] = v.view(len(places), *values.shape[1:]).to(values.dtype)
    for b, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        at = req_to_token[row, :length].long()
        out[b : b + 1] = _attend(query[b : b + 1], keys[at], values[at], None, scale)


def extend_attention_cpu(
    query, k, v, out, keys, values, k_scale, v_scale, req_to_token, rows, lengths, extend_lengths, extend_starts, most,
    scale, cap, cross, window, encoder_lens, sinks, tree_mask, causal,
) -> None:  # fmt: skip
    """Several tokens of each request, whose keys and values are in the cache already."""
    _plain(cap, cross, window, encoder_lens, sinks)
    at_mask = 0
    columns = (rows.tolist(), lengths.tolist(), extend_lengths.tolist(), extend_starts.tolist())
    for row, length, count, start in zip(*columns, strict=True):
        at = req_to_token[row, :length].long()
        own = torch.ones(count, count, dtype=torch.bool).tril()
        if tree_mask is not None:
            own = tree_mask[at_mask : at_mask + count * count].view(count, count).bool()
            at_mask += count * count
        mask = torch.cat([torch.ones(count, length - count, dtype=torch.bool), own], dim=1)
        out[start : start + count] = _attend(query[start : start + count], keys[at], values[at], mask, scale)


class _Ops:
    """What SGLang finds under `torch.ops.sgl_kernel`."""

    decode_attention_cpu = staticmethod(decode_attention_cpu)
    extend_attention_cpu = staticmethod(extend_attention_cpu)


torch.ops.sgl_kernel = _Ops()
