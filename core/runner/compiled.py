"""Networks compiled by torch.compile: passes of few tokens spend their time on launching small operations.

A compiled pass calls attention as an operator that the compiler does not look into. An operator takes tensors and
numbers only, so the views of the cache that serve a pass wait beside it, in a context variable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.errors import message

from ..kernels.attention_spec import AttentionSpec
from .attention import CONTEXT, AttentionContext
from .target import TargetModel

logger = logging.getLogger("specdec")

WARM_UP = 1, 2, 8  # tokens; one is compiled on its own, and linear layers change their form between two and eight

_serving: ContextVar[Sequence[AttentionContext]] = ContextVar("specdec_attention_contexts")

# `torch.library.custom_op` would say this in fewer lines; its checks cost more than the attention of a small model.
_operators = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "attend(Tensor query, Tensor keys, Tensor values, int context, int layer, float scale, int? window, float? softcap)"
    " -> Tensor"
)


def _attend(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [N, Hkv, D]
    values: Tensor,  # [N, Hkv, Dv]
    context: int,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:  # [N, Hq, Dv]
    serving = _serving.get()[context]
    return serving.attend(layer, query, keys, values, AttentionSpec(scale, window, softcap)).contiguous()


def _attend_shapes(query: Tensor, keys: Tensor, values: Tensor, *others: object) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[2])


_operators.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specdec::attend", _attend_shapes, lib=_operators)


class _Operator:
    """The `AttentionContext` that a compiled pass sees in the place of one that serves it."""

    def __init__(self, context: int) -> None:
        self._context = context

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        output: Tensor = torch.ops.specdec.attend(
            query, keys, values, self._context, layer, spec.scale, spec.window, spec.softcap
        )
        return output


class CompiledForward:
    """A network's `forward`, compiled when it is first called; as it was from the first failure on."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        # What is compiled is kept by code object, and which model it is for is not among its guards: hence a copy.
        self._compiled: Callable[..., Any] | None = torch.compile(
            FunctionType(_call.__code__.replace(), globals()),
            dynamic=True,
            fullgraph=True,
            options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},  # weights do not change
        )

    @property
    def is_compiled(self) -> bool:
        """Whether compiling has not failed."""
        return self._compiled is not None

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._compiled is None:
            return self._plain(*args, **named)
        contexts: list[AttentionContext] = []
        by_operator = _with_operators((args, named), contexts)
        try:
            with _served_by(contexts):
                return self._compiled(self._plain, *by_operator[0], **by_operator[1])
        except _compiler_errors() as error:
            self._compiled = None
            facts = {"because": _first_line(error), "so": "it runs as it is"}
            logger.warning("%s", message("SD-W303", "torch.compile cannot compile a network", facts))
            return self._plain(*args, **named)


def _call(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return function(*args, **named)


def _with_operators(value: Any, contexts: list[AttentionContext]) -> Any:
    """A copy of arguments with an operator in the place of every context; those are added to `contexts`."""
    if isinstance(value, Mapping):
        return {
            name: _operator_of(each, contexts) if name == CONTEXT else _with_operators(each, contexts)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_with_operators(each, contexts) for each in value)
    return value


def _operator_of(context: AttentionContext, contexts: list[AttentionContext]) -> _Operator:
    place = next((place for place, each in enumerate(contexts) if each is context), len(contexts))
    if place == len(contexts):
        contexts.append(context)
    return _Operator(place)


@contextmanager
def _served_by(contexts: Sequence[AttentionContext]) -> Iterator[None]:
    before = _serving.set(contexts)
    try:
        yield
    finally:
        _serving.reset(before)


def _compiler_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import TorchDynamoException  # seconds to import; here it is loaded anyway

    return (TorchDynamoException,)


def _first_line(error: Exception) -> str:
    from torch._dynamo.exc import BackendCompilerFailed

    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}"


def compile_network(network: nn.Module) -> CompiledForward:
    """Have a network's passes compiled from the first one on, in seconds for each case of shapes."""
    network.forward = forward = CompiledForward(network.forward)
    return forward


def compile_target(target: TargetModel) -> None:
    """Compile a target's decoder, now, for every number of tokens that is a case apart."""
    started = time.perf_counter()
    forward = compile_network(target.model.get_decoder())
    for num_tokens in WARM_UP:
        target.dummy_pass(num_tokens, 1)
    if forward.is_compiled:
        logger.info("compiled the target's decoder in %.0f s", time.perf_counter() - started)
