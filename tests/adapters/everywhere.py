"""Proposers that run unchanged in every engine: they misuse the interface, or check what they are shown."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np
import torch

from specdec.plugins.forced import ForcedProposer
from specdec.sdk import Draft, HostProposer, Needs, Phase, StrictModel
from specdec.sdk.extensions import DraftKV, TargetKV, Trees
from specdec.sdk.trees import tree_of_paths

VOCAB_SIZE = 4096


class RepeatLast(HostProposer):
    """Drafts the newest token over and over."""

    def draft(self, request, tokens, k):
        return [tokens[-1]] * k


def _too_long(step):
    return Draft(torch.zeros(len(step), step.width + 3, dtype=torch.int64), step.budget + 3)


def _outside(step):
    return Draft(torch.full((len(step), step.width), VOCAB_SIZE), step.budget)


def _arrays(step):
    return [np.zeros(step.width, dtype=np.int64) for _ in range(len(step))]


def _nothing(step):
    return None


def _fewer_rows(step):
    return Draft.from_lists([[0]] * (len(step) - 1), step.width)


def _raises(step):
    raise RuntimeError("on purpose")


MISUSES = (_too_long, _outside, _arrays, _nothing, _fewer_rows, _raises)


class Misuser:
    """Each step another way that kills vLLM's engine when a class of its `custom_class` does it."""

    def __init__(self, config):
        self.calls = 0

    def propose(self, step):
        self.calls += 1
        return MISUSES[self.calls % len(MISUSES)](step)


class EarlyExit:
    """Drafts with the target's head on a state between its layers, and checks that what it reads belongs together."""

    needs = Needs(hidden_states=(0, "final", 7))

    def __init__(self, config):
        pass

    def bind(self, target, services):
        self.services, self.width = services, target.hidden_size

    def observe(self, step):
        kept = step.kept
        embedded, final, _ = kept.hidden
        assert torch.equal(embedded, self.services.embed(kept.token_ids)), "boundary 0 is the embedding"
        sampled = step.phase != Phase.PREFILL
        chosen = self.services.lm_head(final[kept.last]).argmax(dim=-1)
        assert torch.equal(chosen[sampled], step.newest_token[sampled]), "the final state gives the newest token"
        assert torch.equal(kept.next_token_ids[kept.last][sampled], step.newest_token[sampled])

    def propose(self, step):
        between = step.kept.hidden[-1][step.kept.last]
        guess = self.services.lm_head(between).argmax(dim=-1)
        return Draft(guess[:, None].expand(-1, step.width), step.budget.clamp(max=1))


class OnDevice(EarlyExit):
    """The same from rows of fixed shapes, with drafts that the engine may leave where they are."""

    needs = Needs(hidden_states=(0, "final", 7), placement="device")


class Witness(RepeatLast):
    """Raises if what it is told of requests does not fit together."""

    needs = Needs(history=True, state="per_request", sampling=("temperature", "top_k"))
    events: ClassVar[Counter] = Counter()

    class Options(StrictModel):
        temperature: float = 0.0
        top_k: int = 0

    def __init__(self, config):
        super().__init__(config)
        self.expected = (config.options.temperature, config.options.top_k)
        self.alive = {}  # request id -> (row, generation, next position); None: preempted
        self.prompts = {}

    def on_start(self, request):
        assert request.request_id not in self.alive, "started twice"
        self.events["start"] += 1
        self.alive[request.request_id] = (request.slot, request.generation, 0)
        self.prompts[request.request_id] = list(request.prompt_token_ids)

    def on_preempt(self, request):
        self.events["preempt"] += 1
        row, generation, _ = self.alive[request.request_id]
        assert (row, generation) == (request.slot, request.generation)
        self.alive[request.request_id] = None

    def on_finish(self, request):
        self.events["finish"] += 1
        del self.alive[request.request_id]
        super().on_finish(request)

    def observe(self, step):
        facts = zip(
            step.request_ids,
            step.slots.tolist(),
            step.generation.tolist(),
            step.kept.kept_start.tolist(),
            step.kept.next_position.tolist(),
            step.committed_length.tolist(),
            step.phase.tolist(),
            strict=True,
        )
        assert len(set(step.slots.tolist())) == len(step), "two requests in a row"
        sampling = zip(step.sampling.temperature.tolist(), step.sampling.top_k.tolist(), strict=True)
        assert set(sampling) == ({self.expected} if len(step) else set())
        for b, (request_id, row, generation, start, stop, length, phase) in enumerate(facts):
            # One that was preempted goes on behind whole blocks, where they are found again.
            known = self.alive[request_id] or (row, generation, start - start % 16)
            assert known == (row, generation, start), f"{request_id}: {known} before, {(row, generation, start)} now"
            prompt = self.prompts[request_id]
            assert step.history.token_ids(b)[: len(prompt)] == prompt
            assert step.requests[b].slot == row
            assert stop == length - 1 if phase != Phase.PREFILL else stop < length
            self.events[Phase(phase).name] += 1
            self.alive[request_id] = (row, generation, stop)


class ForcedWitness(ForcedProposer):
    """Drafts what a grammar forces, and notes preemptions."""

    def on_preempt(self, request):
        Witness.events["preempt"] += 1


class KVWitness(RepeatLast):
    """Keeps each token and the one after it as draft KV, and raises if a row is of another text than the request's."""

    needs = Needs(
        history=True,
        extensions=(DraftKV(num_layers=1, num_heads=1, head_dim=2, dtype="float32", depends_on_next_token=True),),
    )

    def bind(self, target, services):
        self.services = services

    def observe(self, step):
        kept = step.kept
        pairs = torch.stack([kept.token_ids, kept.next_token_ids], dim=-1)[:, None].float()
        owner = torch.repeat_interleave(step.slots, kept.num_kept)
        self.services.draft_kv().write(0, owner, kept.positions, pairs, -pairs)

    def propose(self, step):
        for b, (row, length) in enumerate(zip(step.slots.tolist(), step.kept.next_position.tolist(), strict=True)):
            keys, values = self.services.draft_kv().read(0, row, length)
            text = step.history.of(b)[: length + 1]
            expected = torch.stack([text[:-1], text[1:]], dim=-1)[:, None].float()
            wrong = (keys != expected).flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert not wrong, f"of another text: positions {wrong} of {length}"
            assert torch.equal(values, -keys)
        return super().propose(step)


class Tree:
    """Drafts what followed the two last occurrences of the newest token, as one tree."""

    needs = Needs(history=True, extensions=(Trees(),))

    def __init__(self, config):
        pass

    def propose(self, step):
        texts = [step.history.token_ids(b) for b in range(len(step))]
        trees = [self._tree(text)[:budget] for text, budget in zip(texts, step.budget.tolist(), strict=True)]
        return Draft.from_trees(trees, step.width)

    @staticmethod
    def _tree(tokens):
        places = [place for place, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        return tree_of_paths([tokens[place + 1 : place + 3] for place in places[-2:]])


class Reader(Witness):
    """Counts the tokens of the prompts that it is shown."""

    def on_start(self, request):
        super().on_start(request)
        self.events.update(f"token {token_id}" for token_id in request.prompt_token_ids)


class TreeWitness(Tree):
    """Raises if the nodes that it is told were accepted do not lead along the text."""

    def __init__(self, config):
        self.trees = {}
        self.num_accepted = 0

    def observe(self, step):
        facts = zip(step.request_ids, step.accepted_nodes.tolist(), strict=True)
        for b, (request_id, padded) in enumerate(facts):
            nodes = [node for node in padded if node >= 0]
            tree = self.trees.pop(request_id, [])
            accepted = step.history.token_ids(b)[-1 - len(nodes) : -1]
            assert [tree[node][1] for node in nodes] == accepted, "tokens of the nodes"
            assert [tree[node][0] for node in nodes] == [-1, *nodes][: len(nodes)], "a path from the root"
            self.num_accepted += len(nodes)

    def propose(self, step):
        draft = super().propose(step)
        columns = zip(step.request_ids, draft.parents.tolist(), draft.token_ids.tolist(), draft.lengths, strict=True)
        for request_id, parents, ids, length in columns:
            self.trees[request_id] = list(zip(parents, ids, strict=True))[:length]
        return draft


class CacheReader:
    """Reads what a layer of the target has cached, and drafts nothing of use."""

    needs = Needs(extensions=(TargetKV(layers=(1,)),))

    def __init__(self, config):
        self.num_read = 0

    def bind(self, target, services):
        self.kv = services.target_kv()

    def propose(self, step):
        for row, length in zip(step.slots.tolist(), step.kept.next_position.tolist(), strict=True):
            keys, values = self.kv.read(1, row, length)
            assert len(keys) == len(values) == length
            assert bool(keys.isfinite().all() & values.isfinite().all())
            assert bool(keys.flatten(1).any(dim=1).all()), "a position that the target did not compute"
            self.num_read += 1
        return Draft.from_lists([[0][:budget] for budget in step.budget.tolist()], step.width)


class SeesIdleSteps(RepeatLast):
    """Raises unless it was shown a dummy step before the first step with requests."""

    num_idle = 0

    def propose(self, step):
        self.num_idle += step.dummy and not len(step)
        assert self.num_idle, "no dummy step came"
        return super().propose(step)
