"""Proposers that draft what comes next anyway, until they do what no proposer should."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time

import torch

from specdec.sdk import Draft, Needs, ProposerBase, StrictModel
from specdec.sdk.combinators import Chain
from specdec.sdk.extensions import Metrics, State


class RepeatsLast(ProposerBase):
    """Drafts the newest token."""

    def propose(self, step):
        return Draft(step.newest_token[:, None].expand(-1, step.width), step.budget)


class LooksUp(ProposerBase):
    """Drafts what followed the newest token before."""

    needs = Needs(history=True, extensions=(Metrics(),))

    def propose(self, step):
        drafts = []
        for place, budget in enumerate(step.budget.tolist()):
            *text, newest = step.history.token_ids(place)
            found = len(text) - 1 - text[::-1].index(newest) if newest in text else len(text)
            drafts.append(text[found + 1 :][:budget])
        return Draft.from_lists(drafts, step.width)

    def metrics(self):
        return {"looked": 1.0}


class Both(Chain):
    """A combinator."""

    parts = (LooksUp, RepeatsLast)


class Options(StrictModel):
    """How it ends, and in which step of a process."""

    how: str = ""
    step: int = 6


class Ends(LooksUp):
    """Does what its options say."""

    Options = Options

    def __init__(self, config):
        super().__init__(config)
        self.steps = 0
        if self.config.options.step == 0:
            WAYS[self.config.options.how]()

    def propose(self, step):
        self.steps += 1
        if self.steps == self.config.options.step:
            WAYS[self.config.options.how]()
        return super().propose(step)


class Learns(RepeatsLast):
    """Has a state that is saved: how many steps it has seen."""

    needs = Needs(state="shared", extensions=(Metrics(), State()))

    def __init__(self, config):
        super().__init__(config)
        self.seen = 0

    def observe(self, step):
        self.seen += 1

    def save(self, path):
        (path / "seen").write_text(str(self.seen))

    def load(self, path):
        self.seen = int((path / "seen").read_text())

    def metrics(self):
        return {"seen": float(self.seen)}


class ReadsStates(ProposerBase):
    """Reads hidden states."""

    needs = Needs(hidden_states=("final",))

    def propose(self, step): ...


def too_much():
    kept = [torch.ones(2**26) for _ in range(64)]  # 256 MiB each
    return len(kept)


def aborts():
    """As C++ does where an allocation fails that nobody expects to."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


def forever():
    while True:
        time.sleep(1)


def fails():
    raise ValueError("in the other process")


def prints():
    print("not for a report")
    os.write(1, b"[20, 1]\n")
    sys.stdout.flush()


WAYS = {
    "exit": lambda: os._exit(0),
    "status": lambda: os._exit(3),
    "leaves": lambda: sys.exit(4),
    "segfault": lambda: ctypes.string_at(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": forever,
    "prints": prints,
    "too_much": too_much,
    "aborts": aborts,
    "raises": fails,
}
