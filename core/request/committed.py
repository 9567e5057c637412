"""What a step did to one request."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from specdec.sdk import Phase

from .request import Request


class Committed(NamedTuple):
    """Facts of the moment after commit: what the request does later does not change them."""

    request: Request
    row: int
    generation: int
    first_token: int  # where its tokens begin in the batch
    num_rows: int  # tokens computed, drafts included
    first_position: int  # of the first of them
    num_kept: int  # rows whose KV survived: everything computed up to, not including, the newest token
    draft_token_ids: list[int]  # verified
    num_accepted: int
    token_ids: list[int]  # committed; empty in the middle of a prompt
    length: int  # of prompt and output, the newest token included

    @classmethod
    def now(
        cls,
        request: Request,
        first_token: int,
        num_rows: int,
        first_position: int,
        draft_token_ids: list[int],
        num_accepted: int,
        token_ids: list[int],
    ) -> Committed:
        """Of a request that has its tokens and stands where its KV ends."""
        return cls(
            request,
            request.row,
            request.generation,
            first_token,
            num_rows,
            first_position,
            request.num_computed_tokens - first_position,
            draft_token_ids,
            num_accepted,
            token_ids,
            len(request.token_ids),
        )

    @classmethod
    def nothing(cls, request: Request) -> Committed:
        """Of a request that ended between steps."""
        return cls.now(request, 0, 0, request.num_computed_tokens, [], 0, [])

    @property
    def num_drafted(self) -> int:
        return len(self.draft_token_ids)

    @property
    def newest_token(self) -> int:
        """In the middle of a prompt, the next prompt token."""
        place = self.length - 1 if self.token_ids else self.first_position + self.num_kept
        return self.request.token_ids[place]

    @property
    def phase(self) -> Phase:
        if not self.token_ids:
            return Phase.PREFILL
        first = self.length - self.request.num_prompt_tokens == len(self.token_ids)
        return Phase.PREFILL_DONE if first else Phase.DECODE


COLUMNS = {
    "rows": attrgetter("row"),
    "generation": attrgetter("generation"),
    "phase": attrgetter("phase"),
    "committed_length": attrgetter("length"),
    "newest_token": attrgetter("newest_token"),
    "num_drafted": attrgetter("num_drafted"),
    "num_accepted": attrgetter("num_accepted"),
}
"""What a view holds one number of per request, by the view's names."""
