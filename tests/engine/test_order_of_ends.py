"""Requests that end in one step are told of in the order of their ids, whatever rows they had."""

from __future__ import annotations

from engine_helpers import GREEDY, make_llm
from inside import proposer_of

from specdec.sdk import HostProposer


class NotesEnds(HostProposer):
    """Drafts nothing, and notes who ended."""

    def __init__(self, config):
        super().__init__(config)
        self.ended = []

    def draft(self, request, tokens, k):
        return []

    def on_finish(self, request):
        super().on_finish(request)
        self.ended.append(request.request_id)


def test_requests_that_end_together_are_told_of_in_the_order_of_their_ids():
    with make_llm("test_order_of_ends:NotesEnds", max_num_seqs=12) as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 12, GREEDY.replace(max_tokens=3))
        ended = proposer_of(llm).ended
    assert len(ended) == 12
    assert ended == sorted(ended)
    assert ended != sorted(ended, key=int), "ids of two digits would show the order of rows"
