"""Structured output: what a request may ask for, and what a backend gives that compiles it.

A backend is a function in the entry-point group `specdec.grammars`: Vocabulary -> GrammarBackend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .config import StructuredOutputs as StructuredOutputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """What a backend is made for."""

    tokenizer: Any  # of transformers
    size: int  # of the logits, padding included
    end_token_ids: frozenset[int]  # those that end a text

    @property
    def num_words(self) -> int:
        """Words of 32 tokens in a mask."""
        return -(-self.size // 32)


class GrammarState(Protocol):
    """Where one text stands in its grammar. It is asked for nothing more once it has ended."""

    @property
    def has_ended(self) -> bool:
        """Whether an end of sequence was accepted."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the text is complete as it stands."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token. False means that the grammar refuses it, and nothing has changed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        ...

    def fill(self, words: Tensor) -> None:
        """Write which tokens may follow, [num_words] int32: bit j of word i is token 32 * i + j."""
        ...

    def forced(self) -> str:
        """The text that must follow whatever else comes, as far as it is known: it may be endless. "" means none."""
        ...


class Grammar(Protocol):
    """A compiled grammar, for any number of texts."""

    def start(self) -> GrammarState:
        """Before the first token."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary."""

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """Raises ValueError, whose text says what is wrong, for what it does not read."""
        ...
