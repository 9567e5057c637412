"""Mistakes about what an engine does not promise, and about what every proposer owes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import torch
from good_proposers import Followers, follow

from specdec.sdk import Needs, StrictModel
from specdec.sdk.errors import deprecated
from specdec.sdk.extensions import Metrics

CALLS = count(1)
INSTANCES = count()
END = threading.Event()  # set by a test, for threads that nobody else ends


class MissesTokensAtTheEnd(Followers):
    """Believes that an output holds whatever steps have shown."""

    def on_finish(self, request):
        shown = self.tokens.pop(request.request_id)
        if len(request.prompt_token_ids) + len(request.end.output_token_ids) < len(shown):
            raise ValueError("tokens are lost")


class KeptByRow(Followers):
    """Keeps the kept tokens of each row, and begins anew where a request begins at position 0."""

    needs = Needs(state="per_request")

    def on_start(self, request):
        self.rows = getattr(self, "rows", {})

    def learn(self, step, b, row, length):
        if self.begins(step, b):
            self.rows[row] = []
        start = int(step.kept.token_offsets[b])
        self.rows[row] += step.kept.token_ids[start : start + int(step.kept.num_kept[b])].tolist()

    def begins(self, step, b):
        return step.kept.kept_start[b] == 0 or int(step.slots[b]) not in self.rows

    def draft(self, step, b, budget):
        return follow([*self.rows[int(step.slots[b])], int(step.newest_token[b])], budget)

    def on_finish(self, request):
        pass


class ExpectsAWholePrompt(KeptByRow):
    """The same, and raises where something lies before."""

    def begins(self, step, b):
        start = int(step.kept.kept_start[b])
        if start > len(self.rows.get(int(step.slots[b]), ())):
            raise ValueError("positions are missing")
        return start == 0


class TakesTheMostOfNone(Followers):
    """The largest budget of a step without requests."""

    def propose(self, step):
        return super().propose(step) if int(step.budget.max()) >= 0 else None


class CountsDummies(Followers):
    """A dummy step leaves a trace."""

    dummies = 0

    def observe(self, step):
        self.dummies += step.dummy
        super().observe(step)

    def draft(self, step, b, budget):
        return [(token + self.dummies) % 50 for token in super().draft(step, b, budget)]


class LooksUpDummies(Followers):
    """On a device, where a dummy step may have requests: they were never started."""

    needs = Needs(history=True, state="per_request", placement="device")


class TellsWhatIsNoNumber(Followers):
    needs = Followers.needs.replace(extensions=(Metrics(),))

    def metrics(self):
        return {"rate": float("nan")}


class ForgetsWhenAsked(Followers):
    """Figures since the last question, and the text with them."""

    needs = Followers.needs.replace(extensions=(Metrics(),))

    def metrics(self):
        known = sum(map(len, self.tokens.values()))
        for tokens in self.tokens.values():
            tokens[:] = [0] * len(tokens)
        return {"known": known}


class EmbedsOnAThread(Followers):
    """Embeds the newest tokens meanwhile."""

    def propose(self, step):
        other = threading.Thread(target=self.embed, args=(step.newest_token.clone(),))
        other.start()
        draft = super().propose(step)
        other.join()
        return draft

    @torch.inference_mode()
    def embed(self, token_ids):
        self.services.embed(token_ids)


class LeavesAThread(Followers):
    """Has a thread that nobody ends."""

    def bind(self, target, services):
        super().bind(target, services)
        threading.Thread(target=END.wait, name="left over").start()


class EmbedsByInstance(Followers):
    """Every second instance looks at an embedding: as one rank would, and the others would not."""

    def bind(self, target, services):
        super().bind(target, services)
        self.number = next(INSTANCES)

    def observe(self, step):
        if self.number % 2:
            self.services.embed(step.newest_token)
        super().observe(step)


class AsksForMoreEachTime(Followers):
    """Needs by the number of calls."""

    @classmethod
    def needs(cls, config, target):
        return Needs(history=True, state="per_request", max_draft_tokens=100 + next(CALLS))


class RequestOptionsOfCode(Followers):
    class RequestOptions(StrictModel):
        measure: Callable[[str], int] = len


Elsewhere = type("Nowhere", (Followers,), {"__module__": __name__})
"""A class that is not found by its name."""


class UsesWhatGoes(Followers):
    """Reads a field that a later version of the contract will not have."""

    def observe(self, step):
        old_width(step)
        super().observe(step)


def old_width(step):
    """What a deprecated property of the contract is: it warns, and gives what it gave."""
    deprecated("StepView.num_draft_tokens", since="1.3", removed_in="2.0", instead="step.width")
    return step.width
