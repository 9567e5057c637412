"""Attention over spans in C: what `attend_by_span` gives, each key and value read once for several rows."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..attention import Span, SpanBatch, attend_in_torch
from ..attention_spec import AttentionSpec
from .build import BuildError, load_library

LONGEST_HEAD = 512  # elements; MAX_DIM in attention.c

_ADDRESS, _INTEGER, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ROWS = (_ADDRESS, _INTEGER, _INTEGER)


class NativeAttention:
    """Stores a batch's new keys and values and attends, in one call.

    A query's result depends on it and its keys alone, to the last bit, whatever else is in the batch.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend
        self._attend.restype = None
        self._attend.argtypes = (
            _ADDRESS, _INTEGER, *_ROWS, *_ROWS, *_ROWS, *[_ADDRESS] * 3, *[_INTEGER] * 6, _NUMBER, _NUMBER
        )  # fmt: skip
        self._multiple: int = library.head_size_multiple()

    @classmethod
    @cache
    def load(cls) -> NativeAttention:
        """Compiled, and compared with PyTorch's attention once. Raises BuildError."""
        attention = cls(load_library(Path(__file__).with_name("attention.c")))
        attention._check()
        return attention

    def __call__(
        self,
        query: Tensor,  # [N, Hq, D]
        keys: Tensor,  # [N, Hkv, D], new ones
        values: Tensor,  # [N, Hkv, Dv]
        stored_keys: Tensor,  # [slots, Hkv, D]
        stored_values: Tensor,  # [slots, Hkv, Dv]
        batch: SpanBatch,
        spec: AttentionSpec,
    ) -> Tensor:  # [N, Hq, Dv]
        """See `SpanAttention`. By PyTorch for what the kernel does not serve."""
        num_heads, key_dim = query.shape[1:]
        num_kv_heads, value_dim = values.shape[1:]
        if not self._serves(query, keys, values, stored_keys):
            return attend_in_torch(query, keys, values, stored_keys, stored_values, batch, spec)
        output = query.new_empty(len(query), num_heads, value_dim)
        table = batch.table
        self._attend(
            table.buffer_info()[0], len(batch.spans),
            *_rows(query), *_rows(keys), *_rows(values),
            stored_keys.data_ptr(), stored_values.data_ptr(), output.data_ptr(),
            num_heads, num_kv_heads, key_dim, value_dim, query.dtype == torch.bfloat16, spec.window or 0,
            spec.scale, spec.softcap or 0.0,
        )  # fmt: skip
        return output

    def _serves(self, query: Tensor, keys: Tensor, values: Tensor, stored: Tensor) -> bool:
        dtype, sizes = query.dtype, (query.shape[2], values.shape[2])
        return (
            dtype in (torch.float32, torch.bfloat16)
            and dtype == keys.dtype == values.dtype == stored.dtype
            and all(size % self._multiple == 0 and size <= LONGEST_HEAD for size in sizes)
            and query.stride(2) == keys.stride(2) == values.stride(2) == 1
        )

    def _check(self) -> None:
        """One batch by both. Raises BuildError if they differ: a compiler may be wrong."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(9, 2, 64), (9, 1, 64), (9, 1, 64), (80, 1, 64), (80, 1, 64)]
        query, keys, values, stored_keys, stored_values = (torch.randn(each, generator=generator) for each in shapes)
        cpu = query.device
        spans = Span(0, 1, 7, slice(0, 7), cpu), Span(1, 8, 70, slice(8, 78), cpu)
        batch, spec = SpanBatch(spans), AttentionSpec(0.125)
        found = self(query, keys, values, stored_keys, stored_values, batch, spec)
        expected = attend_in_torch(query, keys, values, stored_keys, stored_values, batch, spec)
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
            raise BuildError("what the C compiler made gives other results than PyTorch")


def _rows(tensor: Tensor) -> tuple[int, int, int]:
    token, head, _ = tensor.stride()
    return tensor.data_ptr(), token, head
