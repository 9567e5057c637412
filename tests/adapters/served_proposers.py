"""A proposer that servers run in tests, with faults that can be switched on while it serves."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from specdec.sdk import Draft, HostProposer, Needs, StrictModel


class Faulty(HostProposer):
    """Drafts the newest token over and over; has the fault that its file names, as long as it names one."""

    needs = Needs(history=True, state="per_request")

    class Options(StrictModel):
        """`file`: holds the name of the fault."""

        file: str

    class RequestOptions(StrictModel):
        """`least`: read by nobody; the request is refused if it is no number."""

        least: int = 0

    def __init__(self, config):
        super().__init__(config)
        self.file = Path(config.options.file)
        self.started = set()

    @property
    def fault(self):
        return self.file.read_text()

    def on_start(self, request):
        self.started.add(request.request_id)

    def on_finish(self, request):
        super().on_finish(request)
        self.started.remove(request.request_id)

    def propose(self, step):
        assert self.started >= set(step.request_ids), "a request that it was not told of"
        if self.fault == "raises":
            raise RuntimeError("on purpose")
        if self.fault == "nonsense":
            return Draft(torch.full((len(step), step.width), 10**6), step.budget)
        if self.fault == "hangs":
            self.wait_for_somebody()
        return super().propose(step)

    def wait_for_somebody(self):
        while self.fault == "hangs":
            time.sleep(0.01)

    def draft(self, request, tokens, k):
        return [tokens[-1]] * k
