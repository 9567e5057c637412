"""Proposers that SGLang's scheduler runs in tests; the process of the test reads what they wrote."""

from __future__ import annotations

from pathlib import Path

from everywhere import RepeatLast, Witness

from specdec.plugins.ngram import NgramProposer
from specdec.plugins.suffix import SuffixProposer
from specdec.sdk.combinators import Chain


class LookUpThenSuffix(Chain):
    """A combinator of two proposers that read tokens."""

    parts = (NgramProposer, SuffixProposer)


class Diary(Witness):
    """Raises if what it is told of requests does not fit together, and writes down when they begin and end."""

    class Options(Witness.Options):
        path: str

    def __init__(self, config):
        super().__init__(config)
        self.path = Path(config.options.path)

    def note(self, event, request):
        with self.path.open("a") as file:
            file.write(f"{event} {request.request_id} {request.end.reason if request.end else ''}\n")

    def on_start(self, request):
        super().on_start(request)
        self.note("start", request)

    def on_preempt(self, request):
        super().on_preempt(request)
        self.note("preempt", request)

    def on_finish(self, request):
        super().on_finish(request)
        self.note("finish", request)


class Fails(RepeatLast):
    """Has an error whenever it is asked."""

    def draft(self, request, tokens, k):
        raise RuntimeError("on purpose")
