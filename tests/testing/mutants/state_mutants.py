"""Mistakes in what is kept between steps, and in whose it is."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

import torch
from good_proposers import Followers, HiddenMean, SharedFollowers, follow

from specdec.sdk import Draft, Needs, Phase
from specdec.sdk.extensions import State

INSTANCES = count()


class ShiftsLengths(Followers):
    """Works in place on the engine's tensor."""

    def observe(self, step):
        super().observe(step)
        step.committed_length.sub_(1)


class WritesThroughNumpy(Followers):
    """The same through a view that torch does not know of."""

    def observe(self, step):
        super().observe(step)
        step.budget.numpy()[0] = 7


class KeepsAView(HiddenMean):
    """Writes its draft KV a step late, from states of which it has kept no copy."""

    def observe(self, step):
        before, self.before = getattr(self, "before", step), step
        super().observe(before)


class KeepsTheNewest(Followers):
    """Drafts the token that was the newest one a step ago, of which it has kept no copy."""

    def propose(self, step):
        names, newest = getattr(self, "before", (step.request_ids, step.newest_token))
        self.before = step.request_ids, step.newest_token
        drafts = [
            [int(newest[names.index(name)])] * min(budget, 1) if name in names else []
            for name, budget in zip(step.request_ids, step.budget.tolist(), strict=True)
        ]
        return Draft.from_lists(drafts, step.width)


class ShiftsTheWeights(Followers):
    """Shifts the weights that it was lent."""

    def bind(self, target, services):
        super().bind(target, services)
        with torch.no_grad():
            services._embedding.weight.data.add_(0.1)


class ShiftsTheWeightsWhenPreempted(Followers):
    def on_preempt(self, request):
        with torch.no_grad():
            self.services._embedding.weight.data.add_(0.1)


class DraftsByInstance(Followers):
    """Another instance, other drafts: as from an unseeded generator."""

    def bind(self, target, services):
        super().bind(target, services)
        self.number = next(INSTANCES)

    def draft(self, step, b, budget):
        return [(token + self.number) % 50 for token in super().draft(step, b, budget)]


class KeepsInTheClass(Followers):
    """A mutable attribute of the class: two engines have one."""

    every: ClassVar[dict[str, list[int]]] = {}

    def __init__(self, config):
        super().__init__(config)
        self.tokens = self.every


class ForShortTexts(Followers):
    """Has a table of 256 lengths."""

    def draft(self, step, b, budget):
        return super().draft(step, b, budget)[: range(8, 264)[len(self.tokens[step.request_ids[b]])]]


class CutsAtAMark(Followers):
    """Keeps no more than 300 tokens of a text, and where they begin depends on what steps have shown."""

    def __init__(self, config):
        super().__init__(config)
        self.cut = {}

    def learn(self, step, b, row, length):
        tokens, name = self.tokens[step.request_ids[b]], step.request_ids[b]
        tokens.extend(step.history.token_ids(b, len(tokens) + self.cut.get(name, 0)))
        if len(tokens) > 300:
            self.cut[name] = self.cut.get(name, 0) + len(tokens) - 50
            del tokens[:-50]

    def on_finish(self, request):
        super().on_finish(request)
        self.cut.pop(request.request_id, None)


class MixesRequests(Followers):
    """A mean over the batch."""

    def draft(self, step, b, budget):
        return [int(step.newest_token.float().mean())] * budget


class DraftsByPlace(Followers):
    """Takes the place in the step for the request."""

    def draft(self, step, b, budget):
        return [b] * budget


class LearnsInTheOrderOfRows(SharedFollowers):
    """Of two requests that say something different, the one in the later row is believed."""

    def places(self, step):
        return range(len(step))


class LearnsWhileItDrafts(SharedFollowers):
    """Drafts of a request from what those before it in the step have said."""

    def observe(self, step):
        pass

    def draft(self, step, b, budget):
        self.learn(step, b, int(step.slots[b]), int(step.committed_length[b]))
        return super().draft(step, b, budget)


class RemembersPlaces(Followers):
    """Drafts the token that the request in this place got last time: right while the order stays."""

    def propose(self, step):
        drafts = super().propose(step)
        last = getattr(self, "last", {})
        now = dict(enumerate(step.request_ids))
        self.last = now
        moved = [last.get(b, name) != name for b, name in now.items()]
        ids = torch.where(torch.tensor(moved)[:, None] & (drafts.token_ids >= 0), 1, drafts.token_ids)
        return Draft(ids, drafts.lengths)


class BelievesItsDrafts(Followers):
    """Takes its drafts for committed."""

    def draft(self, step, b, budget):
        draft = super().draft(step, b, budget)
        self.tokens[step.request_ids[b]] += draft
        return draft


class OnlyTheLastChunk(Followers):
    """Learns a prompt when it is done, from what that step computed."""

    def learn(self, step, b, row, length):
        if step.phase[b] != Phase.PREFILL:
            self.learn_kept(step, b)

    def learn_kept(self, step, b):
        start = int(step.kept.token_offsets[b])
        shown = step.kept.next_token_ids[start : start + int(step.kept.num_kept[b])].tolist()
        self.tokens[step.request_ids[b]] += shown


class ForgetsTheAbsent(OnlyTheLastChunk):
    """Drops whoever is not in the step."""

    def observe(self, step):
        for name, tokens in self.tokens.items():
            if name not in step.request_ids:
                tokens.clear()
        super().observe(step)

    def learn(self, step, b, row, length):
        self.learn_kept(step, b)

    def draft(self, step, b, budget):
        return follow([0, *self.tokens[step.request_ids[b]]], budget)


class LearnsReplaysTwice(ForgetsTheAbsent):
    """Appends what is shown, wherever it starts."""

    def observe(self, step):
        Followers.observe(self, step)


class ClearsEverything(ForgetsTheAbsent):
    """When one ends, all are forgotten."""

    def observe(self, step):
        Followers.observe(self, step)

    def on_finish(self, request):
        for tokens in self.tokens.values():
            tokens.clear()
        super().on_finish(request)


class KeepsByName(Followers):
    """Goes on where the last request of that name ended."""

    def on_start(self, request):
        self.tokens.setdefault(request.request_id, [])

    def on_finish(self, request):
        pass


class KeepsByPrompt(Followers):
    """Goes on where the last request with that prompt ended."""

    def __init__(self, config):
        super().__init__(config)
        self.longest = {}

    def draft(self, step, b, budget):
        key, length = tuple(step.requests[b].prompt_token_ids), len(self.tokens[step.request_ids[b]])
        self.longest[key] = max(self.longest.get(key, 0), length)
        return [self.longest[key]] * budget


class KeepsByRow(Followers):
    """Goes on where the last owner of the row ended."""

    def on_start(self, request):
        self.rows = getattr(self, "rows", {})

    def learn(self, step, b, row, length):
        tokens = self.rows.setdefault(row, [])
        tokens.extend(step.history.token_ids(b, len(tokens)))

    def draft(self, step, b, budget):
        return follow(self.rows[int(step.slots[b])], budget)

    def on_finish(self, request):
        pass


class StaleKV(HiddenMean):
    """Reads one position more than was written: zeros in a new store, somebody's key in a used one."""

    def propose(self, step):
        drafts = []
        for row, length, budget in zip(
            *(each.tolist() for each in (step.slots, step.committed_length, step.budget)), strict=True
        ):
            keys, _ = self.services.draft_kv().read(0, row, length)
            best = int((keys[:, 0].mean(0) @ self.directions).argmax())
            drafts.append([best] * budget)
        return Draft.from_lists(drafts, step.width)


class KeepsFinished(Followers):
    def on_finish(self, request):
        self.tokens[request.request_id].clear()


class CountsInTheClass(Followers):
    """Keeps the length of every text in an attribute of the class."""

    lengths: ClassVar[dict[str, int]] = {}

    def on_finish(self, request):
        self.lengths[request.request_id] = len(self.tokens[request.request_id])
        super().on_finish(request)


class Counting(torch.nn.Module):
    """A network whose class has an attribute."""

    lengths: ClassVar[dict[str, int]] = {}


class CountsInANetworksClass(Followers):
    """Keeps the length of every text in the class of a layer of its network."""

    def __init__(self, config):
        super().__init__(config)
        self.network = torch.nn.Sequential(Counting())

    def on_finish(self, request):
        self.network[0].lengths[request.request_id] = len(self.tokens[request.request_id])
        super().on_finish(request)


class CountsForever(Followers):
    """Statistics without bound."""

    def on_finish(self, request):
        self.lengths = [*getattr(self, "lengths", []), len(self.tokens[request.request_id])]
        super().on_finish(request)


class LearnsAtTheEnd(Followers):
    """Keeps what ended requests said, the latest last. Keeps the contract: ends are told in the order of ids."""

    needs = Needs(history=True, state="shared")

    def on_finish(self, request):
        self.corpus = [*getattr(self, "corpus", []), *self.tokens.pop(request.request_id)]

    def draft(self, step, b, budget):
        return follow([*getattr(self, "corpus", []), int(step.newest_token[b])], budget)


class SavesCorpus(Followers):
    """Drafts from what all ended requests said, and keeps it. Keeps the contract."""

    needs = Needs(history=True, state="shared", extensions=(State(),))

    def __init__(self, config):
        super().__init__(config)
        self.corpus = []

    def on_finish(self, request):
        self.corpus += self.tokens[request.request_id]
        super().on_finish(request)

    def draft(self, step, b, budget):
        return follow([*self.corpus, int(step.newest_token[b])], budget)

    def save(self, path):
        (path / "corpus").write_text(" ".join(map(str, self.corpus)))

    def load(self, path):
        self.corpus = [int(token) for token in (path / "corpus").read_text().split()]


class SavesNothing(SavesCorpus):
    """Writes an empty file of it."""

    def save(self, path):
        (path / "corpus").write_text("")


class SavesNoRunningRequest(SavesCorpus):
    """Believes that nothing is saved while requests run."""

    def save(self, path):
        assert not self.tokens
        super().save(path)


class LoadsNothingEmpty(SavesCorpus):
    """Believes that somebody has said something by then."""

    def load(self, path):
        self.corpus = [int(token) for token in (path / "corpus").read_text().split(" ")]


class SavesBeside(SavesCorpus):
    """Writes beside the directory that it was given."""

    def save(self, path):
        super().save(path.parent)

    def load(self, path):
        super().load(path.parent)


class OnlySaves(Followers):
    needs = Followers.needs.replace(extensions=(State(),))

    def save(self, path):
        path.write_text("")


class SharesAcrossNamespaces(SharedFollowers):
    """Learns from everybody's text for everybody."""

    def shared(self, request_id: str) -> dict[int, int]:
        return self.followers.setdefault("", {})
