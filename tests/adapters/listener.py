"""A hook plugin that keeps what it is shown of verification: in our engine, or installed beside vLLM."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from specdec.sdk import hookimpl


class Listener:
    """Of each request of each step: its tokens, and the most likely ones by the logits of their rows."""

    seen: ClassVar[list[dict]] = []

    @hookimpl
    def on_verified(self, step):
        for each in step.requests:
            facts = {"request_id": each.request_id, "token_ids": list(each.token_ids)}
            accepted = list(each.draft_token_ids[: each.num_accepted])
            best = step.logits[each.logits_rows].argmax(dim=-1).tolist()
            self.seen.append(facts | {"accepted": accepted, "best": best})


def shown(seen):
    """Greedy texts and the number of accepted drafts. Raises if rows, tokens and drafts do not belong together."""
    texts, num_accepted = defaultdict(list), 0
    for each in seen:
        assert each["best"] == each["token_ids"], "the rows of logits choose the tokens"
        assert each["accepted"] == each["token_ids"][: len(each["accepted"])]
        texts[each["request_id"]] += each["token_ids"]
        num_accepted += len(each["accepted"])
    return sorted(texts.values()), num_accepted
