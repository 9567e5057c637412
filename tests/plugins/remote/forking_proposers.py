"""Proposers that fork helpers, as multiprocessing does on Linux, for their own work."""

from __future__ import annotations

import multiprocessing
import os
import time

from isolated_proposers import RepeatsLast

from specdec.sdk import Needs
from specdec.sdk.extensions import Metrics

FORK = multiprocessing.get_context("fork")


def sleeps(own_session: bool) -> None:
    if own_session:
        os.setsid()
    time.sleep(600)


class HasHelper(RepeatsLast):
    """Begins with a helper, and replaces it whenever a request ends."""

    needs = Needs(extensions=(Metrics(),))

    def bind(self, target, services):
        self.ended = 0.0
        self.begin()

    def begin(self) -> None:
        self.helper = FORK.Process(target=sleeps, args=(False,), daemon=True)
        self.helper.start()

    def on_finish(self, request):
        self.helper.terminate()
        self.helper.join(20)
        self.ended += not self.helper.is_alive()
        self.begin()

    def metrics(self):
        return {"ended": self.ended, "helper": float(self.helper.pid)}


class HasOneOfItsOwn(RepeatsLast):
    """Begins a helper once it is served, in a session of the helper's own: nobody ends it with the proposer."""

    needs = Needs(extensions=(Metrics(),))
    helper = None

    def propose(self, step):
        if self.helper is None:
            self.helper = FORK.Process(target=sleeps, args=(True,), daemon=True)
            self.helper.start()
        return super().propose(step)

    def metrics(self):
        return {"helper": float(self.helper.pid) if self.helper else 0.0}
