"""Outputs of ended requests, shared by the later ones of their namespace, within bounds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

from specdec.sdk.json_files import load_lines, save_lines

from .automaton import SuffixAutomaton

FILE_NAME = "outputs.jsonl"
FORMAT = 2


class _Generation:
    """Outputs, and the automaton of them."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.outputs: list[array[int]] = []
        self.num_tokens = 0  # counting one more per output for its end

    @cached_property
    def automaton(self) -> SuffixAutomaton:
        grown = SuffixAutomaton(self._depth)
        for output in self.outputs:
            grown.extend(output)
            grown.separate()
        return grown

    def add(self, output: Sequence[int]) -> None:
        grown = self.automaton
        del self.automaton  # an interrupt leaves it half grown: the outputs make another one then
        self.num_tokens += len(output) + 1
        self.outputs.append(array("i", output))
        grown.extend(output)
        grown.separate()
        self.automaton = grown


class Corpus:
    """The latest outputs, at most `max_outputs` of them with at most `max_tokens` tokens together.

    They are held in two generations, for an automaton cannot forget a part of its text: new outputs go to the younger,
    and once that holds half of what is allowed, the older one is dropped and the younger takes its place.
    """

    def __init__(self, depth: int, max_outputs: int, max_tokens: int) -> None:
        self._depth, self._max_outputs, self._max_tokens = depth, max_outputs, max_tokens
        self._older, self._younger = _Generation(depth), _Generation(depth)

    def __len__(self) -> int:
        """The number of outputs held."""
        return len(self._older.outputs) + len(self._younger.outputs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens held, counting one more per output for its end."""
        return self._older.num_tokens + self._younger.num_tokens

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        """The automata that hold any text."""
        return tuple(each.automaton for each in (self._younger, self._older) if each.outputs)

    def add(self, output: Sequence[int]) -> None:
        """Take in an output, its first tokens only if it is longer than half of what is allowed in all."""
        output = output[: self._max_tokens // 2 - 1]
        if not output or not self._max_outputs:
            return
        while len(self) and not self._has_room(len(output) + 1):
            self._older, self._younger = self._younger, _Generation(self._depth)
        self._younger.add(output)

    def _has_room(self, num_tokens: int) -> bool:
        younger = self._younger
        return (
            len(self) < self._max_outputs
            and 2 * len(younger.outputs) < self._max_outputs
            and 2 * (younger.num_tokens + num_tokens) <= self._max_tokens
        )

    def outputs(self) -> Iterator[array[int]]:
        """The outputs that are held, the oldest first."""
        return chain(self._older.outputs, self._younger.outputs)


class Corpora:
    """A corpus for each namespace. Together they hold no more than one may: the one added to longest ago gives way."""

    def __init__(self, depth: int, max_outputs: int, max_tokens: int) -> None:
        self._limits = depth, max_outputs, max_tokens
        self._by_namespace: dict[str, Corpus] = {}  # none is empty; the last one added to comes last
        self._num_outputs = self._num_tokens = 0  # of all: to count them anew takes as long as there are namespaces

    def __len__(self) -> int:
        """The number of outputs held."""
        return self._num_outputs

    def automata(self, namespace: str) -> tuple[SuffixAutomaton, ...]:
        """What requests of a namespace share."""
        corpus = self._by_namespace.get(namespace)
        return () if corpus is None else corpus.automata

    def add(self, namespace: str, output: Sequence[int]) -> None:
        """Take in an output."""
        corpus = self._taken(namespace) or Corpus(*self._limits)
        try:
            corpus.add(output)
        finally:  # an interrupt costs the others nothing
            if len(corpus):
                self._by_namespace[namespace] = corpus
                self._num_outputs += len(corpus)
                self._num_tokens += corpus.num_tokens
        _, max_outputs, max_tokens = self._limits
        while self._num_outputs > max_outputs or self._num_tokens > max_tokens:
            self._taken(next(iter(self._by_namespace)))

    def _taken(self, namespace: str) -> Corpus | None:
        """Take a namespace's corpus out."""
        corpus = self._by_namespace.pop(namespace, None)
        if corpus is not None:
            self._num_outputs -= len(corpus)
            self._num_tokens -= corpus.num_tokens
        return corpus

    def save(self, directory: Path, vocab_size: int) -> None:
        """Write the outputs below a directory: a line for each, with its namespace."""
        corpora = self._by_namespace.items()
        entries = ([namespace, list(output)] for namespace, corpus in corpora for output in corpus.outputs())
        save_lines(directory / FILE_NAME, {"format": FORMAT, "vocab_size": vocab_size}, entries)

    def load(self, directory: Path, vocab_size: int) -> None:
        """Add what `save` wrote, as if those requests had ended now. Raises ConfigError SD-E180 if it does not fit."""
        header, form = {"format": FORMAT, "vocab_size": vocab_size}, f"a list of token ids in 0 .. {vocab_size - 1}"
        is_output = partial(_is_output, vocab_size)
        entries = load_lines(directory / FILE_NAME, header, is_output, f"namespace with {form}", "outputs")
        for namespace, output in entries:
            self.add(namespace, output)


def _is_output(vocab_size: int, entry: object) -> bool:
    match entry:
        case [str(), [*token_ids]]:
            return all(type(token) is int and 0 <= token < vocab_size for token in token_ids)
    return False
