"""Prompt look-up (arXiv 2304.04487), whose reach each request chooses: the text's own ending, further up in it."""

from collections.abc import Sequence

from pydantic import Field

from specdec.sdk import HostProposer, RequestView, StrictModel


class Reach(StrictModel):
    """Options of a request."""

    longest: int = Field(default=3, ge=1, description="tokens of the ending that are looked for first")
    shortest: int = Field(default=1, ge=1, description="the fewest tokens that count as a match")


class PromptLookup(HostProposer):
    """Drafts what followed the last occurrence of the longest ending that has one."""

    RequestOptions = Reach
    default_draft_tokens = 5

    def draft(self, request: RequestView[Reach], tokens: Sequence[int], k: int) -> Sequence[int]:
        """At most k ids that followed the ending."""
        for length in range(request.options.longest, request.options.shortest - 1, -1):
            ending = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start : start + length] == ending:
                    return tokens[start + length : start + length + k]
        return []
