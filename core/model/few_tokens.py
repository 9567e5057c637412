"""Recurrences over few tokens: modelling code computes more than one in chunks, which pay for many tokens only.

Modelling code has such an operator in two forms, by chunks and token by token. A module that calls both is given the
second one, or a kernel of the same operator, for few tokens as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

FEW = 16
"""Tokens up to which one after the other is faster than a chunk of them."""

Rule = Callable[..., tuple[Tensor, Tensor | None]]  # of query, key, value and more, [B, N, heads, ...] each


def for_few_tokens(module: nn.Module, kernels: Mapping[str, Rule]) -> Callable[..., Any] | None:
    """The module's forward with these operators exchanged, for this module alone. None: it calls none.

    kernels: by the operator's name, behind what says its form.
    """
    function = inspect.unwrap(type(module).forward)
    if not isinstance(function, FunctionType):
        return None
    exchanged: dict[str, Rule] = {}
    for chunked, by_token in _pairs(function):
        rules = function.__globals__
        few = kernels.get(chunked.rpartition("chunk_")[2], rules[by_token])
        exchanged |= {chunked: _by_length(few, rules[chunked]), by_token: few}
    if not exchanged:
        return None
    seen = function.__globals__ | exchanged
    rebuilt = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    rebuilt.__kwdefaults__ = function.__kwdefaults__
    return MethodType(rebuilt, module)


def _pairs(function: FunctionType) -> Iterator[tuple[str, str]]:
    """Names of operators that the function calls in both forms."""
    called = set(function.__code__.co_names) & set(function.__globals__)
    for name in sorted(called):
        by_token = name.replace("chunk_", "recurrent_")
        if by_token != name and by_token in called:
            yield name, by_token


def _by_length(few: Rule, many: Rule) -> Rule:
    def rule(query: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        return (few if query.shape[1] <= FEW else many)(query, *others, **named)

    return rule
