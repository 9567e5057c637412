"""A target's decoder compiled by torch.compile for steps of few tokens, whose time goes into launching small kernels.

A compiled pass calls attention as an operator that the compiler does not look into. An operator takes tensors and
numbers only, so the view of the cache that serves a pass waits beside it, in a context variable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.errors import message

from ..kernels.attention_spec import AttentionSpec
from .attention import AttentionContext
from .target import TargetModel

logger = logging.getLogger("specdec")

MOST_TOKENS = 64  # of a compiled pass: what larger ones compute hides their launches
WARM_UP = 1, 2, 8  # tokens; one is compiled on its own, and linear layers change their form between two and eight

_serving: ContextVar[AttentionContext] = ContextVar("specdec_attention_context")

# `torch.library.custom_op` would say this in fewer lines; its checks cost more than the attention of a small model.
_operators = torch.library.Library("specdec", "DEF")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "attend(Tensor query, Tensor keys, Tensor values, int layer, float scale, int? window, float? softcap) -> Tensor"
)


def _attend(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [N, Hkv, D]
    values: Tensor,  # [N, Hkv, Dv]
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:  # [N, Hq, Dv]
    return _serving.get().attend(layer, query, keys, values, AttentionSpec(scale, window, softcap)).contiguous()


def _attend_shapes(query: Tensor, keys: Tensor, values: Tensor, *others: object) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[2])


_operators.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specdec::attend", _attend_shapes, lib=_operators)


class _Operator:
    """The `AttentionContext` that a compiled pass sees."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        output: Tensor = torch.ops.specdec.attend(query, keys, values, layer, spec.scale, spec.window, spec.softcap)
        return output


@contextmanager
def _served_by(context: AttentionContext) -> Iterator[None]:
    before = _serving.set(context)
    try:
        yield
    finally:
        _serving.reset(before)


class CompiledForward:
    """A decoder's `forward`: compiled for few tokens, as it was for many."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        self._operator = _Operator()
        # What is compiled is kept by code object, and which model it is for is not among its guards: hence a copy.
        self._compiled = torch.compile(
            FunctionType(_call.__code__.replace(), globals()),
            dynamic=True,
            fullgraph=True,
            options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},  # weights do not change
        )

    def __call__(self, input_ids: Tensor, *, specdec_context: AttentionContext, **others: Any) -> Any:
        if input_ids.shape[1] > MOST_TOKENS:
            return self._plain(input_ids, specdec_context=specdec_context, **others)
        with _served_by(specdec_context):
            return self._compiled(self._plain, input_ids, specdec_context=self._operator, **others)


def _call(function: Callable[..., Any], *args: Any, **others: Any) -> Any:
    return function(*args, **others)


def compile_decoder(target: TargetModel) -> None:
    """Compile for every number of tokens that is compiled apart. A target that cannot be compiled stays as it is.

    That is said in a warning, SD-W303.
    """
    decoder = target.model.get_decoder()
    plain, started = decoder.forward, time.perf_counter()
    decoder.forward = CompiledForward(plain)
    try:
        for num_tokens in WARM_UP:
            target.dummy_pass(num_tokens, 1)
    except Exception as error:  # whatever the compiler cannot do, or the C++ compiler that it cannot find
        decoder.forward = plain
        facts = {"because": _first_line(error), "so": "it runs as it is"}
        logger.warning("%s", message("SD-W303", "torch.compile cannot compile the target's decoder", facts))
    else:
        logger.info("compiled the target's decoder in %.0f s", time.perf_counter() - started)


def _first_line(error: Exception) -> str:
    from torch._dynamo.exc import BackendCompilerFailed  # seconds to import, and here it is loaded anyway

    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}"
