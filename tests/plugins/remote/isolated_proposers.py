"""Proposers that draft what comes next anyway, until they do what no proposer should."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from typing import Literal

import torch

from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs, ProposerBase, StrictModel
from specdec.sdk.combinators import Chain
from specdec.sdk.extensions import Metrics, State, TargetTokens


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


class DrawsOptions(StrictModel):
    """How a distribution is reported."""

    kind: Literal["DENSE_PROBS", "DENSE_LOGITS", "SPARSE"]
    dtype: str = "float32"
    own_vocabulary: bool = False


class Draws(ProposerBase):
    """Draws from the tokens of the text, each as often as it stands there. The others are seldom, or never drawn."""

    Options = DrawsOptions
    MOST = 128

    @classmethod
    def needs(cls, config, target):
        sparse = config.options.kind == "SPARSE"
        vocabulary = tuple(range(0, target.vocab_size, 2)) if config.options.own_vocabulary else None
        return Needs(
            history=True,
            distributions=("sparse" if sparse else "dense",),
            sparse_top_m=cls.MOST if sparse else 0,
            draft_vocabulary=vocabulary,
            sampling=("temperature",),
        )

    def bind(self, target, services):
        own = self.config.options.own_vocabulary
        self.ids = torch.arange(0, target.vocab_size, 2 if own else 1)

    def propose(self, step):
        options, rows, tokens = self.config.options, [], []
        for place, temperature in enumerate(step.sampling.temperature.tolist()):
            text = torch.tensor(step.history.token_ids(place))
            counts = (text[:, None] == self.ids).sum(0).double()
            counts += 1e-6 if options.kind == "DENSE_LOGITS" else 0
            counts[0] += 0.1
            logits = (counts.log() / (temperature or 1)).to(getattr(torch, options.dtype))
            probs = logits.double().softmax(0).to(logits.dtype)
            sums = probs.double().cumsum(0)
            uniforms = [float(step.random.uniform(index)[place]) for index in range(step.width)]
            drawn = [int((sums <= uniform * sums[-1]).sum()) for uniform in uniforms]
            rows.append((logits if options.kind == "DENSE_LOGITS" else probs).expand(step.width, -1))
            tokens.append(self.ids[drawn])
        table = torch.stack(rows)
        kind = (step.sampling.temperature > 0).to(torch.uint8) * int(DistributionKind[options.kind])
        if options.kind == "SPARSE":
            probs, ids = table.topk(self.MOST)
            told = {"sparse_probs": probs, "sparse_ids": ids.masked_fill(probs == 0, -1)}
        else:
            told = {"probs" if options.kind == "DENSE_PROBS" else "logits": table}
        return Draft(torch.stack(tokens), step.budget, distribution=DraftDistribution(kind=kind, **told))


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


class EndsWithStates(Ends):
    """Is shown hidden states too."""

    needs = Needs(history=True, hidden_states=("final",), extensions=(Metrics(),))


class SlowWithStates(LooksUp):
    """Is shown hidden states, and takes its time."""

    needs = Needs(history=True, hidden_states=("final",), extensions=(Metrics(),))

    def propose(self, step):
        time.sleep(0.5)
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


class ReadsLikelyTokens(ProposerBase):
    """Reads the target's likeliest tokens."""

    needs = Needs(extensions=(TargetTokens(top_k=2),))

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


def fails_at_length():
    raise ValueError("\u754c" * 20_000)  # the text and the traceback: 120 kB


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
    "raises_at_length": fails_at_length,
}
