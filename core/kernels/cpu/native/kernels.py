"""The library's kernels as operators of PyTorch's: loaded once, and compared with PyTorch's own before they serve."""

from __future__ import annotations

from functools import cache
from math import gcd
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor, nn

from ...attention import Span, SpanBatch, attend_in_torch
from ...attention_spec import AttentionSpec
from .build import BuildError, load_library

SOURCES = Path(__file__).parent
DTYPES = torch.float32, torch.bfloat16


class NativeKernels:
    """Attention over spans, products with packed weights, norms, and the gated delta rule.

    What a query or a row gives depends on it alone, to the last bit, whatever else is in the batch.
    """

    _loading = Lock()  # an operator is registered once

    def __init__(self, sources: Path = SOURCES) -> None:
        """Raises BuildError."""
        library = load_library(sources)
        if library.functions.register_operators(library.name.encode()):
            raise BuildError("PyTorch does not take its operators")
        operators = getattr(torch.ops, library.name)
        self.linear = operators.linear.default
        self.rms_norm = operators.rms_norm.default
        self.delta_rule = operators.delta_rule.default
        self._attend = operators.attend.default
        self._attend_at = operators.attend_at.default
        self._no_sinks = torch.empty(0, dtype=torch.float32)  # limits that are 0 are none either
        self.outputs_per_panel: int = library.functions.outputs_per_panel()
        self._head_multiple: int = library.functions.head_size_multiple()
        self._longest_head: int = library.functions.longest_head()
        torch.library.register_fake(f"{library.name}::linear", shape_of_linear)
        torch.library.register_fake(f"{library.name}::attend_at", shape_of_attention)

    @classmethod
    def load(cls) -> NativeKernels:
        """Load the kernels of this machine. Raises BuildError."""
        with cls._loading:
            found = _loaded()
        if isinstance(found, BuildError):
            raise found
        return found

    def attend(
        self,
        query: Tensor,  # [N, Hq, D]
        keys: Tensor,  # [N, Hkv, D], new ones
        values: Tensor,  # [N, Hkv, Dv]
        stored_keys: Tensor,  # [slots, Hkv, D]
        stored_values: Tensor,  # [slots, Hkv, Dv]
        batch: SpanBatch,
        spec: AttentionSpec,
    ) -> Tensor:  # [N, Hq, Dv]
        """Attend as `attend_in_torch`, which serves what this does not. Keys and values are read once for
        several rows.
        """
        is_plain = query.dtype == keys.dtype == values.dtype == stored_keys.dtype
        is_plain &= query.stride(2) == keys.stride(2) == values.stride(2) == 1
        if not is_plain or not self.serves_heads(query.dtype, query.shape[2], values.shape[2]):
            return attend_in_torch(query, keys, values, stored_keys, stored_values, batch, spec)
        sinks = self._no_sinks if spec.sinks is None else spec.sinks.float()
        limits = spec.scale, spec.window or 0, spec.softcap or 0.0, spec.chunk or 0
        output: Tensor = self._attend(query, keys, values, stored_keys, stored_values, batch.table, sinks, *limits)
        return output

    def attend_at(
        self,
        query: Tensor,  # [N, Hq, D]
        keys: Tensor,  # [N, Hkv, D], new ones
        values: Tensor,  # [N, Hkv, Dv]
        table: Tensor,  # that of a `SpanBatch`
        storage: Tensor,  # [L, 2] int64: addresses of stored keys and values, laid out as for `attend`
        layer: int,
        spec: AttentionSpec,
    ) -> Tensor:  # [N, Hq, Dv]
        """The same for heads that are served, of tensors and numbers only, for a compiler."""
        sinks = self._no_sinks if spec.sinks is None else spec.sinks.float()
        limits = spec.scale, spec.window or 0, spec.softcap or 0.0, spec.chunk or 0
        output: Tensor = self._attend_at(query, keys, values, table, storage, sinks, layer, *limits)
        return output

    def serves_heads(self, dtype: torch.dtype, *sizes: int) -> bool:
        """Whether it attends with heads of such sizes, rather than PyTorch."""
        return dtype in DTYPES and gcd(*sizes) % self._head_multiple == 0 and max(sizes) <= self._longest_head

    def can_pack(self, weight: Tensor) -> bool:
        """Whether `linear` multiplies by such weights [out, in]."""
        return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0)

    def pack(self, weight: Tensor) -> Tensor:
        """[out, in] as `linear` reads it, P outputs together: [panels, in, P] fp32, [panels, in/2, P, 2] bfloat16."""
        num_outputs, num_inputs = weight.shape
        size = self.outputs_per_panel
        num_panels = -(-num_outputs // size)
        missing = num_panels * size - num_outputs
        padded = nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
        if weight.dtype == torch.bfloat16:
            return padded.view(num_panels, size, num_inputs // 2, 2).transpose(1, 2).contiguous()
        return padded.view(num_panels, size, num_inputs).transpose(1, 2).contiguous()

    def check(self) -> None:
        """All of it against PyTorch, once. Raises BuildError if they differ: a compiler may be wrong."""
        generator = torch.Generator().manual_seed(0)
        for dtype, tolerance in zip(DTYPES, (1e-4, 2e-2), strict=True):
            serves = self._attends, self._multiplies, self._normalizes
            if not all(each(dtype, tolerance, generator) for each in serves):
                raise BuildError("what the C compiler made gives other results than PyTorch")

    def _attends(self, dtype: torch.dtype, tolerance: float, generator: torch.Generator) -> bool:
        shapes = [(9, 2, 64), (9, 1, 64), (9, 1, 64), (80, 1, 64), (80, 1, 64)]
        query, keys, values, stored_keys, stored_values = (
            torch.randn(each, generator=generator).to(dtype) for each in shapes
        )
        spans = Span(0, 1, 7, slice(0, 7), query.device), Span(1, 8, 70, slice(8, 78), query.device)
        batch = SpanBatch(spans)
        inputs = query, keys, values, stored_keys, stored_values
        query64, keys64, values64, stored_keys64, stored_values64 = (each.double() for each in inputs)
        addresses = torch.tensor([[stored_keys.data_ptr(), stored_values.data_ptr()]])
        sinks = torch.tensor([0.5, 1.0], dtype=torch.float32)
        for spec in AttentionSpec(0.125), AttentionSpec(0.125, chunk=66, sinks=sinks):
            expected = attend_in_torch(query64, keys64, values64, stored_keys64, stored_values64, batch, spec)
            found = self.attend(*inputs, batch, spec)
            again = self.attend_at(query, keys, values, batch.table, addresses, 0, spec)
            if not torch.equal(found, again) or not torch.allclose(found.double(), expected, tolerance, tolerance):
                return False
        return True

    def _multiplies(self, dtype: torch.dtype, tolerance: float, generator: torch.Generator) -> bool:
        input, weight, bias = (torch.randn(each, generator=generator).float() for each in [(8, 40), (70, 40), (70,)])
        input, weight = input.to(dtype), weight.to(dtype)
        packed, expected = self.pack(weight), input.double() @ weight.double().t() + bias
        products = (self.linear(input[:count], packed, bias, len(bias)) for count in range(1, 9))
        return all(torch.allclose(each.double(), expected[: len(each)], tolerance, tolerance) for each in products)

    def _normalizes(self, dtype: torch.dtype, tolerance: float, generator: torch.Generator) -> bool:
        rows, gain = (torch.randn(each, generator=generator).float() for each in [(3, 72), (72,)])
        rows = rows.to(dtype)
        expected = nn.functional.rms_norm(rows.double(), (72,), gain.double(), 1e-5)
        found = [self.rms_norm(rows, gain, 1e-5, rounds_first).double() for rounds_first in (0, 1)]
        return all(torch.allclose(each, expected, tolerance, tolerance) for each in found)


@cache
def _loaded() -> NativeKernels | BuildError:
    try:
        kernels = NativeKernels()
        kernels.check()
    except BuildError as error:
        return error
    return kernels


def shape_of_linear(input: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """The shape of a product with packed weights, for a tracer."""
    return input.new_empty(*input.shape[:-1], num_outputs)


def shape_of_attention(query: Tensor, keys: Tensor, values: Tensor, *others: object) -> Tensor:
    """The shape of attention's output, for a tracer."""
    return query.new_empty(*query.shape[:2], values.shape[2])
