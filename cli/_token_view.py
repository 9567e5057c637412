"""How each token came about, shown by colour and style on a terminal and by signs elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specdec.sdk.trees import branches, depths

if TYPE_CHECKING:
    from specdec.core.engine.outputs import StreamUpdate


class Mark(StrEnum):
    """What became of a piece of text; the value is its sign."""

    PLAIN = ""  # nothing was drafted
    ACCEPTED = "+"
    REJECTED = "-"
    SAMPLED = "*"  # recovered after a rejection, or the bonus token after none


STYLES = {
    Mark.PLAIN: "",
    Mark.ACCEPTED: "green underline",
    Mark.REJECTED: "red strike",
    Mark.SAMPLED: "bold blue",
}


@dataclass(frozen=True)
class Piece:
    """Text with one mark."""

    mark: Mark
    text: str


class StepPieces:
    """Splits what each step did to one request into pieces: accepted, rejected, then recovered or bonus."""

    def __init__(self, tokenizer: Any) -> None:
        from specdec.core.request.request import Detokenizer

        self._tokenizer = tokenizer
        self._grown = Detokenizer(tokenizer, (), skip_special_tokens=True)
        self._num_shown = 0

    def of(self, update: StreamUpdate) -> list[Piece]:
        """The pieces of one step; without the rejected ones they are the text of its tokens.

        Of a tree the rejected ones are the branches that were met at the end of the accepted path.
        """
        count = update.num_accepted
        met = [branch for parent, _, branch in _rejected(update) if parent == count - 1]
        accepted, ended = self._text(update.token_ids[:count], False), update.finish_reason is not None
        pieces = [
            Piece(Mark.ACCEPTED, accepted),
            *(self._draft(update, branch) for branch in met),
            Piece(Mark.SAMPLED if update.draft_token_ids else Mark.PLAIN, self._text(update.token_ids[count:], ended)),
        ]
        return [piece for piece in pieces if piece.text]

    def beside(self, update: StreamUpdate) -> list[tuple[int, Piece]]:
        """The branches of a tree that left the accepted path before its end, with the depth of their first tokens.

        A branch of a branch counts too.
        """
        end = update.num_accepted - 1
        return [(depth, self._draft(update, branch)) for parent, depth, branch in _rejected(update) if parent != end]

    def _draft(self, update: StreamUpdate, nodes: Sequence[int]) -> Piece:
        return Piece(Mark.REJECTED, self._tokenizer.decode([update.draft_token_ids[node] for node in nodes]))

    def _text(self, token_ids: Sequence[int], ended: bool) -> str:
        """What these tokens add to the text; `ended`: no other follows."""
        for token_id in token_ids:
            self._grown.append(token_id)
        first, text = self._num_shown, self._grown.text(ended)
        self._num_shown = len(text)
        return text[first:]


def _rejected(update: StreamUpdate) -> Iterator[tuple[int, int, list[int]]]:
    """What was rejected as chains, each with the parent and the depth of its first token. A chain has one at most."""
    count, parents = update.num_accepted, update.draft_parents
    if parents is None:
        parents = tuple(range(-1, len(update.draft_token_ids) - 1))
    depth = depths(parents)
    for branch in branches(parents):
        rejected = [node for node in branch if node >= count]
        if rejected:
            yield parents[rejected[0]], depth[rejected[0]], rejected


class HeldPieces:
    """Gives out pieces only as far as their text is out: an end that may begin a stop text is not."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def release(self, pieces: Sequence[Piece], num_characters: int) -> list[Piece]:
        """Take new pieces in; give out as many characters as were released, rejected ones not counted."""
        self._pieces += pieces
        released: list[Piece] = []
        while self._pieces and (num_characters > 0 or self._pieces[0].mark is Mark.REJECTED):
            piece = self._pieces.pop(0)
            if piece.mark is not Mark.REJECTED:
                if len(piece.text) > num_characters:
                    self._pieces.insert(0, replace(piece, text=piece.text[num_characters:]))
                    piece = replace(piece, text=piece.text[:num_characters])
                num_characters -= len(piece.text)
            released.append(piece)
        return released


class Painter:
    """Prints pieces: with colour and style where the console has them, with signs where it has not.

    With signs, `[+ ...]` is accepted, `[- ...]` rejected and `[* ...]` recovered or bonus; brackets and backslashes of
    the text itself have a backslash before them.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._coloured = console.is_terminal and console.color_system is not None and not console.no_color

    def print_plain(self, text: str) -> None:
        """Text as it is."""
        self._console.file.write(text)
        self._console.file.flush()

    def print(self, pieces: Sequence[Piece]) -> None:
        """The pieces, and nothing after them."""
        self._write([(piece.mark, piece.text if self._coloured else _escaped(piece.text)) for piece in pieces])

    def print_step(self, number: int, update: StreamUpdate, pieces: Sequence[Piece]) -> None:
        """Print one line: the step's number, accepted / drafted, and the pieces as JSON texts."""
        head = f"{number:>5}  {update.num_accepted}/{len(update.draft_token_ids)}  "
        texts = [(piece.mark, json.dumps(piece.text, ensure_ascii=False)) for piece in pieces]
        spaced = [item for each in texts for item in (each, (Mark.PLAIN, " "))]
        self._write([(Mark.PLAIN, head), *spaced[:-1], (Mark.PLAIN, "\n")])

    def print_beside(self, branches: Sequence[tuple[int, Piece]]) -> None:
        """Print a line for each branch that left the accepted path: its depth, and its text as JSON."""
        for depth, piece in branches:
            text = json.dumps(piece.text, ensure_ascii=False)
            self._write([(Mark.PLAIN, f"       depth {depth}  "), (piece.mark, text), (Mark.PLAIN, "\n")])

    def _write(self, texts: Sequence[tuple[Mark, str]]) -> None:
        if self._coloured:
            self._console.print(Text.assemble(*((text, STYLES[mark]) for mark, text in texts)), end="", soft_wrap=True)
            return
        self.print_plain("".join(text if mark is Mark.PLAIN else f"[{mark} {text}]" for mark, text in texts))


def _escaped(text: str) -> str:
    return re.sub(r"[\[\]\\]", r"\\\g<0>", text)
