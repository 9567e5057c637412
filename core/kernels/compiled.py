"""Networks and passes compiled by PyTorch's compiler: those of few tokens spend their time on small operations.

They are traced by `torch.export`, not by `torch.compile`, whose guards and bytecode take a part of every step of a
small model: of a network whose weights stay, only the sizes of its inputs are to be watched.

A compiled pass calls attention as an operator that the compiler does not look into. An operator takes tensors and
numbers only. A view of the cache that our kernels serve is two tensors; other views wait beside a pass that they
serve, in a context variable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from specdec.sdk.errors import ConfigError, message

from ..cache.addressing import CacheView
from ..cache.kv_cache import KVCache
from ..model.attention import CONTEXT
from ..model.target import TargetModel
from .attention import Span, SpanBatch
from .attention_spec import AttentionContext, AttentionSpec
from .backend import Backend
from .cpu.backend import NativeBackend
from .cpu.native.kernels import NativeKernels, shape_of_attention

if TYPE_CHECKING:
    from torch.export import ExportedProgram

logger = logging.getLogger("specdec")

WARM_UP = (1, 1), (2, 1), (3, 2)  # tokens and rows of logits; one of anything is compiled on its own

MOST_COMPILED = 16
"""Ways of calling one network: beyond them something varies that should be a tensor."""

MOST_REMEMBERED = 10_000
"""Sizes of arguments whose form is known; of others it is looked for anew."""

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # they check the compiler, and take a tenth of a small pass
    "emulate_precision_casts": True,  # in bfloat16, passes of one token and of many round at the same places
}

ON_A_GPU: dict[str, Any] = {"combo_kernels": True}  # queries and keys are turned in one launch
_PLAIN = type(None), bool, int, float, str, torch.dtype
_serving: ContextVar[Sequence[AttentionContext]] = ContextVar("specdec_attention_contexts")

# `torch.library.custom_op` would say this in fewer lines; its checks cost more than the attention of a small model.
_operators = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "attend(Tensor query, Tensor keys, Tensor values, int context, int layer, float scale, int? window, float? softcap,"
    " int? chunk, Tensor? sinks)"
    " -> Tensor"
)


def _attend(  # noqa: PLR0913  # an operator takes no `AttentionSpec`
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [N, Hkv, D]
    values: Tensor,  # [N, Hkv, Dv]
    context: int,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    sinks: Tensor | None,  # [Hq]
) -> Tensor:  # [N, Hq, Dv]
    serving = _serving.get()[context]
    spec = AttentionSpec(scale, window, softcap, chunk, sinks)
    return serving.attend(layer, query, keys, values, spec).contiguous()


_operators.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specdec::attend", shape_of_attention, lib=_operators)


class _Operator:
    """The `AttentionContext` that a compiled pass sees in the place of one that serves it."""

    def __init__(self, context: int) -> None:
        self._context = context

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        output: Tensor = torch.ops.specdec.attend(
            query, keys, values, self._context, layer, spec.scale, spec.window, spec.softcap, spec.chunk, spec.sinks
        )
        return output


@dataclass(frozen=True)
class _TensorView:
    """A `CacheView` of our kernels', as the tensors that it consists of."""

    table: Tensor
    storage: Tensor
    cache: KVCache
    kernels: NativeKernels

    @classmethod
    def of(cls, context: AttentionContext) -> _TensorView | None:
        """The tensors of a view that compiled code can read. None for any other view."""
        if not isinstance(context, CacheView) or not isinstance(context.backend, NativeBackend):
            return None
        cache, kernels = context.cache, context.backend.kernels
        if not all(kernels.serves_heads(cache.dtype, *sizes) for sizes in cache.head_sizes):
            return None
        return cls(context.batch.table, cache.addresses, cache, kernels)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Raises ValueError, while it is traced, for what is not stored like that: addresses do not tell."""
        stored = self.cache.keys[layer], self.cache.values[layer]
        if any(new.shape[1:] != old.shape[1:] for new, old in zip((keys, values), stored, strict=True)):
            raise ValueError(f"layer {layer} has keys and values of other sizes than the cache")
        if {query.dtype, keys.dtype, values.dtype} != {self.cache.dtype}:
            raise ValueError(f"layer {layer} computes in {query.dtype}, the cache stores {self.cache.dtype}")
        query, keys, values = (each if each.stride(2) == 1 else each.contiguous() for each in (query, keys, values))
        return self.kernels.attend_at(query, keys, values, self.table, self.storage, layer, spec)


class CompiledFunction:
    """A function of tensors, compiled for arguments of a kind when they first come; as it was from a failure on.

    Besides what hooks keep in `kept` it may do nothing else: that happens while it is traced and not again, and
    attention whose output it does not use is left out. Others like it, which it calls, are traced as a part of it.
    """

    def __init__(self, plain: Callable[..., Any], kept: MutableMapping[Any, Tensor] | None = None) -> None:
        self._plain = plain
        self._kept = {} if kept is None else kept
        self._compiled: list[_Compiled] = []
        self._serving: dict[tuple[Any, ...], _Compiled] = {}  # by arguments
        self._failed = False

    @property
    def is_compiled(self) -> bool:
        """Whether it was compiled, and compiling has not failed."""
        return bool(self._compiled) and not self._failed

    @property
    def num_compiled(self) -> int:
        """How many times it was compiled."""
        return len(self._compiled)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._failed or torch.compiler.is_exporting():
            return self._plain(*args, **named)
        arguments = _Arguments()
        try:
            arguments.add((args, named))
            serving = self._serving.get(tuple(arguments.kind)) or self._find(arguments, (args, named))
        except Exception as error:  # whatever the tracer, the compiler and modelling code raise
            self._failed = True
            facts = {"because": _first_line(error), "so": "it runs as it is"}
            logger.warning("%s", message("SD-W303", f"torch.compile cannot compile {_name(self._plain)}", facts))
            return self._plain(*args, **named)
        before = _serving.set(arguments.contexts)
        try:
            outputs = serving.run(*serving.weights, *arguments.tensors)
        finally:
            _serving.reset(before)
        self._kept.update(zip(serving.kept, outputs[serving.num_outputs :], strict=True))
        return tree_unflatten(outputs[: serving.num_outputs], serving.form)

    def _find(self, arguments: _Arguments, value: Any) -> _Compiled:
        """What is compiled already and serves these arguments too, or compiled for them; `value`: (args, named)."""
        found = next((each for each in self._compiled if each.serves(arguments)), None)
        if found is None:
            if len(self._compiled) == MOST_COMPILED:
                raise ValueError(f"it is called in more than {MOST_COMPILED} ways")
            found = _compile(self._plain, self._kept, arguments, value)
            self._compiled.append(found)
        if len(self._serving) == MOST_REMEMBERED:
            self._serving.clear()
        self._serving[tuple(arguments.kind)] = found
        return found


class _Arguments:
    """What a network is called with: its tensors in order, and all that another call must have in common with it."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []  # contiguous
        self.contexts: list[AttentionContext] = []
        self.kind: list[Any] = []  # hashable

    def add(self, value: Any) -> None:
        """Raises TypeError for what is neither a tensor nor a plain value."""
        if isinstance(value, Tensor):
            self.tensors.append(value.contiguous())
            self.kind += (value.shape, value.dtype)
        elif isinstance(value, Mapping):
            self.kind += (len(value), *value)
            for name, each in value.items():
                if name == CONTEXT:
                    self._add_context(each)
                else:
                    self.add(each)
        elif isinstance(value, (list, tuple)):
            self.kind.append(len(value))
            for each in value:
                self.add(each)
        elif isinstance(value, _PLAIN):
            self.kind += (type(value), value)  # 1 and True are equal
        else:
            raise TypeError(f"an argument is of type {type(value).__name__}")

    def _add_context(self, context: AttentionContext) -> None:
        view = _TensorView.of(context)
        if view is None:
            self.kind.append(self._place(context))
        else:
            self.kind += (view.kernels, view.cache.layout)
            self.add((view.table, view.storage))

    def _place(self, context: AttentionContext) -> int:
        for place, each in enumerate(self.contexts):
            if each is context:
                return place
        self.contexts.append(context)
        return len(self.contexts) - 1


@dataclass(frozen=True)
class _Compiled:
    """One compiled form."""

    run: Callable[..., Sequence[Tensor]]  # of weights, then the tensors of its arguments
    weights: tuple[Tensor, ...]  # and other constants of the network
    num_outputs: int  # tensors of the network's own output; those of `kept` follow
    form: Any  # of its output, for tree_unflatten
    kept: tuple[Any, ...]  # names of what hooks kept
    check_sizes: Callable[..., object]  # raises AssertionError for arguments of which the trace is not true
    kind: tuple[Any, ...]  # of the arguments, without sizes

    def serves(self, arguments: _Arguments) -> bool:
        """Whether what was assumed of sizes while it was traced is true of these."""
        if self.kind != _without_sizes(arguments.kind):
            return False
        try:
            self.check_sizes(*arguments.tensors)
        except AssertionError:
            return False
        return True


def _without_sizes(kind: Sequence[Any]) -> tuple[Any, ...]:
    """Which sizes are none, one or more: the trace is true of one of these. Shapes are the only tuples of a kind."""
    return tuple(tuple(min(size, 2) for size in each) if isinstance(each, tuple) else each for each in kind)


class _Traceable(nn.Module):
    """A function of tensors in the form that `torch.export` takes."""

    def __init__(self, function: Callable[..., list[Any]]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> list[Any]:
        return self._function(*tensors)


def _compile(
    function: Callable[..., Any], kept: MutableMapping[Any, Tensor], arguments: _Arguments, value: Any
) -> _Compiled:
    """Trace a function for any sizes, and compile what was traced; `value`: its (args, named)."""
    from torch import _inductor as inductor  # seconds to import
    from torch.export import Dim, export

    forms: list[Any] = []

    def of_tensors(*tensors: Tensor) -> list[Any]:
        args, named = _with_tensors(value, iter(tensors), arguments.contexts)
        kept.clear()
        outputs, form = tree_flatten(function(*args, **named))
        forms.append((len(outputs), form, tuple(kept)))
        return [*outputs, *kept.values()]

    examples = tuple([torch.empty_like(each) for each in arguments.tensors])  # each apart from the others
    any_size = tuple(  # but of none and one: the trace is true of these alone, and export warns of what it finds so
        {place: Dim.AUTO if size > 1 else Dim.STATIC for place, size in enumerate(each.shape)} for each in examples
    )
    with torch.no_grad():
        program = export(_Traceable(of_tensors), examples, dynamic_shapes=(any_size,), strict=False)
        inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
        options = OPTIONS | (ON_A_GPU if any(each.is_cuda for each in examples) else {})
        run = inductor.compile(program.graph_module, [each.meta["val"] for each in inputs], options=options)
    kept.clear()
    num_outputs, form, names = forms[-1]
    check_sizes = program.module().get_submodule("_guards_fn")
    kind = _without_sizes(arguments.kind)
    return _Compiled(run, _weights(program), num_outputs, form, names, check_sizes, kind)


def _weights(program: ExportedProgram) -> tuple[Tensor, ...]:
    """What a program takes before its arguments, in order."""
    named = {**program.state_dict, **program.constants}
    return tuple(named[each.target].detach() for each in program.graph_signature.input_specs if each.target is not None)


def _with_tensors(value: Any, tensors: Iterator[Tensor], contexts: Sequence[AttentionContext]) -> Any:
    """A copy of arguments with other tensors, in contexts as well, or an operator in the place of a context."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(tensors)
        return leaf if isinstance(leaf, _PLAIN) else _traced(leaf, tensors, contexts)

    return tree_map(other, value)


def _traced(context: AttentionContext, tensors: Iterator[Tensor], contexts: Sequence[AttentionContext]) -> Any:
    view = _TensorView.of(context)
    if view is not None:
        return replace(view, table=next(tensors), storage=next(tensors))
    return _Operator(next(place for place, known in enumerate(contexts) if known is context))


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, MethodType):
        return f"{type(function.__self__).__name__}.{function.__name__}"
    return str(function)


def _first_line(error: BaseException) -> str:
    """The first line of what the compiler's own errors are about."""
    cause = getattr(error, "inner_exception", None) or error
    return f"{type(cause).__name__}: {(str(cause).strip().splitlines() or ['no message'])[0]}"


def compile_target(target: TargetModel, cache: KVCache, backend: Backend) -> None:
    """Compile a target's passes, now, for every number of tokens and of rows of logits that is a case apart.

    No request owns the cache yet. Raises ConfigError SD-E261 for layers that keep a state.
    """
    if cache.states is not None:  # how many inputs such layers read again differs from step to step
        facts = {"asked": "torch_compile", "fix": "leave it out"}
        raise ConfigError("SD-E261", "a model whose layers keep a state is not compiled", facts)
    started = time.perf_counter()
    target.run = run = CompiledFunction(target.run, target.kept_hidden_states)
    for num_tokens, num_rows in WARM_UP:
        target.dummy_pass(num_tokens, num_rows, _vacant_view(cache, backend, num_tokens))
    if run.is_compiled:
        logger.info("compiled the target in %.0f s", time.perf_counter() - started)


def _vacant_view(cache: KVCache, backend: Backend, num_tokens: int) -> CacheView:
    """Serves a pass of so many tokens: all of them use the first slot."""
    slots = torch.zeros(num_tokens, dtype=torch.int64, device=cache.device)
    return CacheView(cache, SpanBatch((Span(0, num_tokens, num_tokens, slots, cache.device),)), backend)
