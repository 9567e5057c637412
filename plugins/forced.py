"""Drafts what must follow by a request's grammar, as the tokens with which the tokenizer would write it.

A grammar forces a text and hardly ever a token: the target may write the same text in other tokens. So the draft is one
more guess, and is verified like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from specdec.sdk import Draft, Needs, ProposerBase, Services, StepView, TargetInfo
from specdec.sdk.extensions import Grammars

MOST_KNOWN = 4096
"""Forced texts whose tokens are remembered."""
MOST_CHARACTERS = 64
"""Of forced text for each token of a draft: the rest, which may be long, is not encoded."""


class ForcedProposer(ProposerBase):
    """Drafts keys, punctuation and constants of structured output. Other requests get no drafts."""

    needs = Needs(extensions=(Grammars(),))
    default_draft_tokens = 8

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Keep what knows the grammars and the tokens."""
        self._services = services
        self._known = lru_cache(MOST_KNOWN)(self._encoded)  # requests of one schema are forced to the same text

    def propose(self, step: StepView[Any]) -> Draft:
        """What each request's grammar forces behind its newest token."""
        rows = zip(step.requests, step.newest_token.tolist(), step.budget.tolist(), strict=True)
        return Draft.from_lists([self._draft(each.request_id, token, k) for each, token, k in rows], step.width)

    def _draft(self, request_id: str, newest: int, k: int) -> Sequence[int]:
        """The forced text behind the newest token, encoded with it: a token may reach across the end of the text."""
        forced = self._services.forced(request_id)[: k * MOST_CHARACTERS] if k else ""
        return self._known(newest, forced)[:k] if forced else []

    def _encoded(self, newest: int, forced: str) -> tuple[int, ...]:
        """The tokens that the tokenizer writes for `forced` behind the newest token.

        Where the tokenizer would write that one in other tokens, those stand for it. Where a token reaches across its
        end, `forced` is encoded alone.
        """
        tokenizer = self._services.tokenizer
        tail: tuple[int, ...] = (newest,)
        text = tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ids = self._ids(text + forced)
        if ids[: len(tail)] != tail:
            tail = self._ids(text)
        return ids[len(tail) :] if ids[: len(tail)] == tail else self._ids(forced)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._services.tokenizer.encode(text, add_special_tokens=False))
