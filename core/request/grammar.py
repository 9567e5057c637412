"""What the grammar of one request allows: behind its newest token, and behind each of its drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy
import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.sdk.structured_outputs import GrammarState, Vocabulary

P = ParamSpec("P")
T = TypeVar("T")
_ANY = -1  # every bit of a word
_FAILED: Any = SimpleNamespace(
    has_ended=False, may_end=False, accept=lambda token_id: False, fill=lambda words: None, forced=lambda: ""
)
"""In the place of a state that raised: it refuses what is committed, and bars nothing until then."""


def _contained(method: Callable[Concatenate[RequestGrammar, P], T]) -> Callable[Concatenate[RequestGrammar, P], T]:
    """Where the backend raises, `on_failure` is told, and the grammar is stuck from then on: its request ends."""

    @wraps(method)
    def answered(grammar: RequestGrammar, /, *args: P.args, **named: P.kwargs) -> T:
        try:
            return method(grammar, *args, **named)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if grammar.on_failure is None or isinstance(error, (KeyboardInterrupt, SystemExit)):  # a signal's handler
                raise
            grammar.on_failure(error)
            grammar._state = _FAILED
            return method(grammar, *args, **named)

    return answered


class RequestGrammar:
    """A request's place in its grammar, moved by committed tokens only."""

    def __init__(self, state: GrammarState, vocabulary: Vocabulary) -> None:
        self.on_failure: Callable[[BaseException], None] | None = None  # told of its errors; None: they pass
        self._state = state
        self._num_words = vocabulary.num_words
        self._here: Tensor | None = None  # what may follow the newest token. None: not asked for yet

    @_contained
    def accept(self, token_id: int) -> bool:
        """Go on by a committed token. False: the grammar refuses it. What follows an end that was ignored is free."""
        self._here = None
        return self._state.has_ended or self._state.accept(token_id)

    @property
    @_contained
    def is_stuck(self) -> bool:
        """Whether no token may follow."""
        return self._state is _FAILED or not bool(self._mask().any())

    @property
    @_contained
    def has_ended(self) -> bool:
        """Whether an end of sequence was committed."""
        return self._state.has_ended

    @property
    @_contained
    def may_end(self) -> bool:
        """Whether the text is complete as it stands."""
        return self._state.may_end

    @_contained
    def allows_only(self, token_ids: Set[int]) -> bool:
        """Whether nothing but one of these may follow."""
        words = self._mask().tolist()
        for token_id in token_ids:
            words[token_id // 32] &= ~(1 << token_id % 32)
        return not any(word & 0xFFFFFFFF for word in words)

    @_contained
    def masks(self, drafts: Sequence[int], parents: Sequence[int] | None = None) -> Tensor:
        """Which tokens may follow the newest token and each of n drafts: bits, [n + 1, num_words] int32.

        parents: as of `Draft`. None means a chain. Nothing is barred behind a draft that is refused, or that no token
        may follow: none is taken from there.
        """
        rows = torch.full((len(drafts) + 1, self._num_words), _ANY, dtype=torch.int32)
        rows[0] = self._mask()
        children: defaultdict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(range(-1, len(drafts) - 1) if parents is None else parents):
            children[parent].append(node)
        if not self._state.has_ended:
            self._fill_behind(children, drafts, rows)
        return rows

    def _fill_behind(self, children: Mapping[int, Sequence[int]], drafts: Sequence[int], rows: Tensor) -> None:
        """Fill the rows behind drafts. The state goes along their paths, and comes back: a chain may be a thousand."""
        path = [iter(children.get(-1, ()))]
        while path:
            child = next(path[-1], None)
            if child is None:
                path.pop()
                if path:
                    self._state.rollback(1)
            elif drafts[child] >= 0 and self._state.accept(drafts[child]):
                if not self._state.has_ended:
                    self._state.fill(rows[child + 1])
                    if not bool(rows[child + 1].any()):
                        rows[child + 1] = _ANY
                path.append(iter(() if self._state.has_ended else children.get(child, ())))

    @_contained
    def allowed(self, suffix: Sequence[int], vocab_size: int) -> Tensor:
        """Which tokens may follow a suffix, [V] bool; none where it is refused itself."""
        words, num_accepted = torch.zeros(self._num_words, dtype=torch.int32), 0
        for token_id in suffix:
            if self._state.has_ended or not self._state.accept(token_id):
                break
            num_accepted += 1
        if num_accepted == len(suffix):
            words = self._fill() if suffix else self._mask()
        if num_accepted:
            self._state.rollback(num_accepted)
        return unpacked(words[None], vocab_size)[0]

    @_contained
    def forced(self) -> str:
        """The text that must follow. "" means that none is known."""
        return "" if self._state.has_ended else self._state.forced()

    def _mask(self) -> Tensor:
        if self._here is None:
            self._here = self._fill()
        return self._here

    def _fill(self) -> Tensor:
        words = torch.full((self._num_words,), _ANY, dtype=torch.int32)
        if not self._state.has_ended:
            self._state.fill(words)
        return words


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Bits [n, num_words] int32 on the CPU as [n, V] bool."""
    bits = numpy.unpackbits(words.numpy().view(numpy.uint8), axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)
