"""The proposer: it asks the service, and no step waits for the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.request import urlopen

from specdec.sdk import LateProposer, RequestView
from specdec.sdk.late_proposer import LateOptions


class RetrievalService(LateProposer):
    """Drafts of `service.py`."""

    class Options(LateOptions):
        """Beside those of every LateProposer."""

        url: str = "http://127.0.0.1:8008"

    def ask(self, request: RequestView[Any], tokens: Sequence[int], k: int) -> Sequence[int]:
        """One question, on a thread of the base's."""
        question = json.dumps({"token_ids": tokens, "k": k}).encode()
        with urlopen(self.config.options.url, data=question, timeout=2) as answer:
            return json.load(answer)["token_ids"]
