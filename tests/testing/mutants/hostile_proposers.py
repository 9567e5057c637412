"""Proposers that raise, hang or crash: what an author is told of them."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import torch
from good_proposers import Followers

from specdec.sdk import HostProposer, Needs
from specdec.sdk.model_proposer import AutoregressiveProposer


class Loops(HostProposer):
    def draft(self, request, tokens, k):
        print("looping", file=sys.stderr, flush=True)
        while True:
            pass


class SwallowsInterrupts(HostProposer):
    def draft(self, request, tokens, k):
        print("looping", file=sys.stderr, flush=True)
        while True:
            with suppress(BaseException):
                time.sleep(1000)


class SleepsThroughErrors(Followers):
    """Waits in a method of its lifecycle, and keeps whatever is raised there."""

    def on_start(self, request):
        super().on_start(request)
        with suppress(Exception):
            time.sleep(1000)


class LoopsInC(HostProposer):
    """No signal is handled before the sum is known."""

    def draft(self, request, tokens, k):
        print("looping", file=sys.stderr, flush=True)
        return [sum(itertools.repeat(0))]


class Crashes(HostProposer):
    def draft(self, request, tokens, k):
        ctypes.string_at(0)
        return []


class DraftsTooMany(HostProposer):
    def draft(self, request, tokens, k):
        return [1] * (k + 1)


class ReturnsNothing(HostProposer):
    def draft(self, request, tokens, k):
        return None


class WithoutHistory(HostProposer):
    needs = Needs(state="per_request")

    def draft(self, request, tokens, k):
        return []


class ReadsHiddenUndeclared(Followers):
    def observe(self, step):
        super().observe(step)
        self.width = step.kept.hidden[0].shape[1]


class StumblesOverNone(Followers):
    """Declares all that it reads; what is None is its own."""

    def learn(self, step, b, row, length):
        super().learn(step, b, row, length)
        self.tokens.get("nobody")[0] = step.history


class HeadWithoutKV(AutoregressiveProposer):
    """One matrix from a state and a token to the next state, and the target's head."""

    INPUTS_ARE_SHIFTED = True

    @classmethod
    def needs(cls, config, target):
        return cls.shared_needs(config, target, hidden_states=("final",))

    def build(self):
        size = self.target.hidden_size
        self.matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) / size**0.5

    def first(self, inputs):
        return self.advance(inputs, inputs.hidden)[inputs.last]

    def advance(self, inputs, states):
        return torch.tanh(states @ self.matrix + self.services.embed(inputs.token_ids))

    def logits(self, states):
        return self.services.lm_head(states)


class HeadWithFlatLogits(HeadWithoutKV):
    def logits(self, states):
        return super().logits(states)[:, 0]


class HeadThatAttends(HeadWithoutKV):
    """Has a layer of attention, and forgot to declare draft KV."""

    def build(self):
        config = self.target.config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        self.decoder = self.services.build_decoder(config, self.settings)
        self.services.finish(self.decoder, self.settings)

    def advance(self, inputs, states):
        embedded = self.services.embed(inputs.token_ids)
        return self.decoder(
            inputs_embeds=embedded[None], position_ids=inputs.positions[None], use_cache=False, **inputs.attention
        ).last_hidden_state[0]


class MisspeltEnd(HostProposer):
    """Its end and its state are never asked for."""

    def draft(self, request, tokens, k):
        return []

    def on_finnish(self, request):
        pass

    def save(self, path):
        pass

    def load(self, path):
        pass


class EndsWithoutItsBase(HostProposer):
    """Drops what is its own, and leaves the base's tokens."""

    def draft(self, request, tokens, k):
        return tokens[:k]

    def on_finish(self, request):
        pass


class SetsTheDefaultDtype(HostProposer):
    def __init__(self, config):
        super().__init__(config)
        torch.set_default_dtype(torch.float64)

    def draft(self, request, tokens, k):
        return []


class LeavesAThread(HostProposer):
    def bind(self, target, services):
        threading.Thread(target=time.sleep, args=(1000,), name="left over").start()

    def draft(self, request, tokens, k):
        return []


class EndsTheProcess(HostProposer):
    def draft(self, request, tokens, k):
        os._exit(0)


class EndsTheProcessInC(HostProposer):
    def draft(self, request, tokens, k):
        ctypes.CDLL(None)._exit(0)


class Prints(HostProposer):
    """By every way there is."""

    def bind(self, target, services):
        print("printed in bind")
        atexit.register(print, "printed at exit")

    def draft(self, request, tokens, k):
        print("printed in draft")
        os.write(1, b"printed by a library\n")
        subprocess.run(["echo", "printed by a subprocess"], check=True)
        return []


class Sleeps(HostProposer):
    def draft(self, request, tokens, k):
        time.sleep(2)
        return []
