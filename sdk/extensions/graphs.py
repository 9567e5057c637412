"""Functions of tensors that a device records, or that are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from ..config import Extension


class Graphs(Extension):
    """Functions of the proposer's own as graphs or compiled: `Services.capture`, `Services.compile`."""

    name: ClassVar[str] = "graphs"
    version: ClassVar[int] = 1


class GraphServices(Protocol):
    """The methods of `Services` for captured and compiled functions. Each raises Refusal if it was not asked for."""

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a captured graph where the device has graphs, the function itself elsewhere.

        Every argument is a tensor with one row per request. So is the result, or each of a tuple of results. Results
        are valid until the next call. Each row must depend only on its own inputs and on tensors that keep their places
        (weights, draft KV). The function may read nothing back to the host. A row may be computed and written more than
        once.
        """
        ...

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled where the engine compiles (`torch_compile`), the function itself elsewhere.

        Its arguments are tensors, None, numbers, strings, and tuples, lists and mappings of these; the mapping of
        `DraftKVStore.attention` is one. It returns tensors, or tuples, lists and dictionaries of them. It is traced
        like a network's `forward` (see `finish`), and may call networks that are compiled on their own.

        Each kind of arguments is compiled when it first comes: other numbers beside the tensors, other structures, and
        sizes of one instead of more. Call it with every kind in `warmup`; `ModelProposer.warmup` does so.
        """
        ...
