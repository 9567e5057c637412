"""Prints several streamed texts one after the other, however their steps interleave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from ._token_view import HeldPieces, Painter, StepPieces

if TYPE_CHECKING:
    from specdec.core.engine.outputs import StreamUpdate

HEADING_WIDTH = 60


Show = Literal["plain", "tokens", "steps", "why"]
"""How a text is shown."""


class TextView:
    """Shows the first text that has not ended as it grows; later ones wait for their turn."""

    def __init__(self, console: Console, show: Show, tokenizer: Any, prompts: Sequence[str]) -> None:
        self._console, self._painter = console, Painter(console)
        self._show, self._tokenizer, self._prompts = show, tokenizer, prompts
        self._waiting: list[list[StreamUpdate]] = [[] for _ in prompts]
        self._current = 0
        self._begin()

    def update(self, index: int, update: StreamUpdate) -> None:
        """A step of the prompt at `index`."""
        self._waiting[index].append(update)
        while self._current < len(self._prompts) and self._waiting[self._current]:
            update = self._waiting[self._current].pop(0)
            self._print(update)
            if update.finish_reason is not None:
                self._current += 1
                self._begin()

    def _begin(self) -> None:
        """Begin the text whose turn it is, with a heading if there are several."""
        self._pieces, self._held, self._num_steps = StepPieces(self._tokenizer), HeldPieces(), 0
        if len(self._prompts) == 1 or self._current == len(self._prompts):
            return
        prompt = " ".join(self._prompts[self._current].split())
        short = prompt if len(prompt) <= HEADING_WIDTH else prompt[: HEADING_WIDTH - 3] + "..."
        heading = f"=== {self._current + 1}/{len(self._prompts)}: {short} ==="
        self._console.print(heading, style="bold", markup=False, highlight=False, soft_wrap=True)

    def _print(self, update: StreamUpdate) -> None:
        """Print one step; after the last one, end the line."""
        self._num_steps += 1
        pieces = self._pieces.of(update)
        if self._show == "steps":
            self._painter.print_step(self._num_steps, update, pieces)
            self._painter.print_beside(self._pieces.beside(update))
            return
        if self._show in ("tokens", "why"):
            self._painter.print(self._held.release(pieces, len(update.text)))
        else:
            self._painter.print_plain(update.text)
        if update.finish_reason is not None:
            self._painter.print_plain("\n")
