"""Retrieval elsewhere: a service is asked while the target goes on, and no step waits for it."""

import json
from collections.abc import Sequence
from typing import Any
from urllib.request import urlopen

from specdec.sdk import LateProposer, RequestView
from specdec.sdk.late_proposer import LateOptions


class RemoteRetrieval(LateProposer):
    """Posts the text, and drafts what comes back, re-based on what was committed meanwhile."""

    class Options(LateOptions):
        """Beside those of every LateProposer."""

        url: str

    def ask(self, request: RequestView[Any], tokens: Sequence[int], k: int) -> Sequence[int]:
        """One question, on a thread of the base's."""
        question = json.dumps({"namespace": request.namespace, "token_ids": tokens, "k": k}).encode()
        with urlopen(self.config.options.url, data=question, timeout=2) as answer:
            return json.load(answer)["token_ids"]
