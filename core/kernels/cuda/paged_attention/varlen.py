"""Paged attention by PyTorch's `varlen_attn`, where the installed one takes block tables and can serve them.

torch 2.13 has the arguments, 2.11 need not. What reads block tables behind them is FlashAttention 3, a package of its
own for Hopper: where it is installed, and nobody has activated another, it is activated here. Then the signature is
looked at, and one small call is tried, once per device, dtype, block size and head size.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from ...attention import Pages
from ...attention_spec import AttentionSpec

NAME = "FlashAttention, behind PyTorch's varlen_attn"
LIBRARY = "flash_attn_interface"
"""The module of FlashAttention 3."""


@cache
def is_served(device: torch.device, dtype: torch.dtype, block_size: int, head_size: int) -> bool:
    """Whether `varlen_attn` attends by block table on this device: the second of two blocks is asked for one key."""
    takes = inspect.signature(varlen_attn).parameters
    if dtype not in (torch.bfloat16, torch.float16) or not {"block_table", "seqused_k", "window_size"} <= set(takes):
        return False
    _activate(device)
    stored = torch.zeros(2 * block_size, 1, head_size, dtype=dtype, device=device)
    stored[block_size] = 1
    table, num_keys = (torch.ones(shape, dtype=torch.int32, device=device) for shape in ((1, 1), (1,)))
    pages = Pages(table, num_keys, torch.arange(2, dtype=torch.int32, device=device), block_size, 1, block_size)
    try:
        return bool(
            attend_pages(stored.new_ones(1, 2, head_size), stored, stored, pages, AttentionSpec(1.0)).eq(1).all()
        )
    except RuntimeError:  # what torch raises for arguments that no kernel behind it takes
        return False


def _activate(device: torch.device) -> None:
    """Put FlashAttention 3 behind PyTorch's attention, for the whole process, unless something else was put there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or find_spec(LIBRARY) is None:
        return
    if nn.attention.current_flash_attention_impl() is None:
        with suppress(ImportError, RuntimeError, ValueError):  # it is built for another torch, and our kernel serves
            nn.attention.activate_flash_attention_impl("FA3")


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
    """Compute `kernels.attention.attend_pages` by PyTorch's `varlen_attn`."""
    keys, values = (stored.view(-1, pages.block_size, *stored.shape[1:]) for stored in (keys, values))
    right = -1 if pages.mode == "full_block" else 0
    output: Tensor = varlen_attn(  # type: ignore[assignment]  # without auxiliary outputs it is one tensor
        query.contiguous(),
        keys,
        values,
        pages.cu_queries,
        None,
        pages.max_queries,
        pages.max_keys,
        scale=spec.scale,
        window_size=(-1 if spec.window is None else spec.window - 1, right),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=pages.num_keys,
        block_table=pages.block_table,
    )
    return output
