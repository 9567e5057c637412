"""Text of a growing token list, and the stop texts that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Decodes token by token (whole characters only) and looks for stop texts.

    `text` is what may be shown: it never includes a stop text, nor, before the request ended, a beginning of one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], skip_special_tokens: bool) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._holdback = max((len(text) for text in stop), default=1) - 1
        self._decoded = ""
        self._stopped = False

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Decode one more token. Returns the stop text that the output now contains, if it may stop yet."""
        piece = self._stream.step(self._backend, token_id)
        if piece is None:
            return None
        searched_from = max(len(self._decoded) - self._holdback, 0)
        self._decoded += piece
        if not may_stop or not self._stop:
            return None
        found = [(at, text) for text in self._stop if (at := self._decoded.find(text, searched_from)) >= 0]
        if not found:
            return None
        at, text = min(found)
        self._decoded, self._stopped = self._decoded[:at], True
        return text

    def text(self, finished: bool) -> str:
        """The output so far; while the request runs, without an end that may turn out to begin a stop text."""
        if finished or not self._holdback:
            return self._decoded
        return self._decoded[: max(len(self._decoded) - self._holdback, 0)]
