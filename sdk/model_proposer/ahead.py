"""Drafting between steps: a network that reads tokens alone drafts behind the likeliest outcomes of its last drafts.

The drafts behind all outcomes of a request are branches that share the keys and values of its text. One pass runs one
token of each branch of every request. Keys and values of branches lie behind those of the last draft. Where an outcome
happens, its branch's are copied to their positions. What a branch lacks is drafted as always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..extensions import DraftKV, DraftKVStore
from ..types import Draft, StepView, TargetInfo
from .fan_out import NUM_GUESSES, FanOut, Guess
from .vocabulary import DraftVocabulary, target_ids

FIGURES = ("ahead_whole", "ahead_part", "ahead_missed")
Run = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]
"""Logits [b, D] after the inputs `last` [b] of token ids [M] at positions [M], with arguments of the attention."""


@dataclass
class _Branches:
    """Drafts behind outcomes of a request's last draft."""

    start: int  # the position of the first token of that draft
    num_drafts: int
    accepted: list[int]  # by branch, how many of them the outcome accepts
    tokens: list[list[int]]  # by branch: the token of the outcome, then what follows it
    likely: list[list[list[int]]]  # by branch and token that was run: the likeliest tokens after it

    @property
    def num_levels(self) -> int:
        """Tokens of each branch that were run."""
        return len(self.likely[0])

    @property
    def is_whole(self) -> bool:
        """Whether there is a draft as long as the last one, and the likeliest tokens after each of its tokens."""
        return self.num_levels > self.num_drafts

    def place(self, branch: int, level: int) -> int:
        """Where the keys and values of a token lie: behind the draft, level by level."""
        return self.start + self.num_drafts + level * len(self.accepted) + branch

    def parents(self) -> list[int]:
        """The parents of the draft's tokens and of the branches' tokens, up to the level that is run next."""
        width, nodes = len(self.accepted), list(range(-1, self.num_drafts - 1))
        nodes += [accepted - 1 for accepted in self.accepted]
        return nodes + [self.num_drafts + index for index in range(self.num_levels * width)]

    def find(self, num_accepted: int, token: int) -> int | None:
        """The branch of an outcome."""
        outcomes = zip(self.accepted, self.tokens, strict=True)
        return next((branch for branch, (n, ids) in enumerate(outcomes) if (n, ids[0]) == (num_accepted, token)), None)


@dataclass
class _Text:
    """A request's tokens, and what was drafted behind them."""

    slot: int
    generation: int
    ids: list[int] = field(default_factory=list)
    num_committed: int = 0  # of `ids`; the others are drafts
    num_run: int = 0  # of `ids`, whose keys and values lie at their positions
    likely: dict[int, list[int]] = field(default_factory=dict)  # after positions from the newest token's on
    branches: _Branches | None = None

    @property
    def num_drafts(self) -> int:
        return len(self.ids) - self.num_committed

    def cut(self, length: int) -> None:
        """Forget what is behind so many tokens."""
        del self.ids[length:]
        self.num_run = min(self.num_run, length)
        self.likely = {place: ids for place, ids in self.likely.items() if place < length}

    def commit(self, num_tokens: int) -> None:
        """So many tokens more are the text's."""
        self.num_committed += num_tokens
        self.likely = {place: ids for place, ids in self.likely.items() if place >= self.num_committed - 1}
        self.branches = None

    def guesses(self, num_accepted: int) -> list[int]:
        """Tokens that may stand behind so many accepted drafts, the likeliest first."""
        place = self.num_committed + num_accepted
        rejected = self.ids[place : place + 1]
        return [token for token in self.likely.get(place - 1, []) if [token] != rejected]

    def fork(self, guesses: Sequence[Guess]) -> None:
        """Begin branches."""
        tokens = [[self.guesses(guess.num_accepted)[guess.rank]] for guess in guesses]
        accepted = [guess.num_accepted for guess in guesses]
        self.branches = _Branches(self.num_committed, self.num_drafts, accepted, tokens, [[] for _ in guesses])


class AheadDrafter:
    """Drafts greedily, one token after the other, and between steps. It keeps the texts of requests by slot."""

    def __init__(
        self,
        run: Run,
        kv: DraftKVStore,
        declared: DraftKV,
        vocabulary: DraftVocabulary | None,
        target: TargetInfo,
        device: torch.device,
    ) -> None:
        """run: a network that reads tokens and its draft KV alone."""
        self._run, self._kv, self._num_layers = run, kv, declared.num_layers
        self._vocabulary, self._device = vocabulary, device
        self._longest = target.max_model_len
        self._texts: dict[int, _Text] = {}
        self._drafted: list[_Text] = []  # in the last step, as long as the longest
        self._fan_out = FanOut()
        self._figures: Counter[str] = Counter()

    @torch.inference_mode()
    def observe(self, step: StepView) -> None:
        """Run what the step committed to requests that want no drafts; of the others it is run with the drafts."""
        self._drafted = []  # a chain may not ask for drafts
        if step.dummy:  # of another text in the same slots
            self._texts.clear()
        ends = step.kept.next_position.tolist()
        places = [place for place, budget in enumerate(step.budget.tolist()) if not budget]
        texts = [self._text(step, place) for place in places]
        for text, place in zip(texts, places, strict=True):
            self._take(text, self._new_tokens(step, place, text)[: max(ends[place] - text.num_committed, 0)])
            text.cut(text.num_committed)
        self._extend([text for text in texts if text.num_run < len(text.ids)])

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        budgets = step.budget.tolist()
        texts = {place: self._text(step, place) for place, budget in enumerate(budgets) if budget}
        for place, text in texts.items():
            self._take(text, self._new_tokens(step, place, text), budgets[place])
        waiting = [(text, text.num_committed + budgets[place]) for place, text in texts.items()]
        while waiting := [(text, length) for text, length in waiting if not _is_drafted(text, length)]:
            self._extend([text for text, _ in waiting])
        drafts: list[list[int]] = [[] for _ in budgets]
        for place, text in texts.items():
            text.cut(text.num_committed + budgets[place])
            drafts[place] = text.ids[text.num_committed :]
        longest = max((text.num_drafts for text in texts.values()), default=0)
        self._drafted = [text for text in texts.values() if text.num_drafts == longest]
        return Draft.from_lists(drafts, step.width)

    @torch.inference_mode()
    def draft_ahead(self, num_outcomes: int) -> bool:
        """Do one pass: over the ends of the last drafts, or over one token of each branch. See `Ahead`."""
        behind = [text for text in self._drafted if text.num_run < len(text.ids)]
        if behind:
            self._extend(behind)
            return True
        if not self._drafted:
            return False
        if self._drafted[0].branches is None:
            guesses = self._fan_out.best(self._drafted[0].num_drafts, num_outcomes)
            for text in self._drafted:
                text.fork(guesses)
        branches = [each for text in self._drafted if (each := text.branches)]
        if not branches[0].is_whole:
            self._grow(branches)
        return not branches[0].is_whole

    def metrics(self) -> Mapping[str, float]:
        """Requests whose draft was ready when they asked, was begun, and was not among those prepared."""
        return {name: float(self._figures[name]) for name in FIGURES}

    def _text(self, step: StepView, place: int) -> _Text:
        slot, generation = int(step.slots[place]), int(step.generation[place])
        text = self._texts.get(slot)
        if text is None or text.generation != generation:
            text = self._texts[slot] = _Text(slot, generation)
        return text

    @staticmethod
    def _new_tokens(step: StepView, place: int, text: _Text) -> list[int]:
        assert step.history is not None, "declared"
        return step.history.token_ids(place, text.num_committed)

    def _take(self, text: _Text, tokens: list[int], budget: int = 0) -> None:
        """Tokens were committed: keep the drafts that they confirm, or the branch of what happened."""
        if not tokens:
            return
        drafts = text.ids[text.num_committed :]
        same = _num_common(drafts, tokens)
        rest, branches, prepared = tokens[same:], text.branches, None
        if len(rest) == 1 and text.likely:
            guesses = text.guesses(same)
            rank = guesses.index(rest[0]) if rest[0] in guesses else NUM_GUESSES
            self._fan_out.record(same, len(drafts), rank)
            prepared = None if branches is None else branches.find(same, rest[0])
        if rest:
            text.cut(text.num_committed + same)
            text.ids += rest
        if branches is not None and prepared is not None:
            self._adopt(text, branches, prepared)
        text.commit(len(tokens))
        if branches is not None and budget:
            is_whole, is_begun = text.num_drafts >= budget, text.num_drafts > 0
            self._figures["ahead_whole" if is_whole else "ahead_part" if is_begun else "ahead_missed"] += 1

    def _adopt(self, text: _Text, branches: _Branches, branch: int) -> None:
        """The branch is what follows the text, whose newest token is the branch's first."""
        first, count = len(text.ids) - 1, branches.num_levels
        if not count:
            return
        places = [branches.place(branch, level) for level in range(count)]
        slots, positions = self._tensor([text.slot] * count), self._tensor(range(first, first + count))
        for layer in range(self._num_layers):
            keys, values = self._kv.read(layer, text.slot, places[-1] + 1)
            self._kv.write(layer, slots, positions, keys[places], values[places])
        text.ids += branches.tokens[branch][1:]
        text.num_run = first + count
        text.likely |= {first + level: ids for level, ids in enumerate(branches.likely[branch])}

    def _extend(self, texts: Sequence[_Text]) -> None:
        """One pass over the tokens of each that were not run."""
        if not texts:
            return
        inputs = [text.ids[text.num_run :] for text in texts]
        bounds = [0, *accumulate(map(len, inputs))]
        starts = [text.num_run for text in texts]
        slots, cu_queries = self._tensor([text.slot for text in texts]), self._tensor(bounds)
        attention = self._kv.attention(slots, self._tensor(starts), cu_queries)
        positions = [place for text in texts for place in range(text.num_run, len(text.ids))]
        token_ids = self._tensor([token for ids in inputs for token in ids])
        likely = self._likely(token_ids, self._tensor(positions), cu_queries[1:] - 1, attention)
        for text, ids in zip(texts, likely, strict=True):
            text.num_run = len(text.ids)
            text.likely[text.num_run - 1] = ids

    def _grow(self, branches: Sequence[_Branches]) -> None:
        """One pass over the last token of each branch."""
        width, level = len(branches[0].accepted), branches[0].num_levels
        cu_queries = self._tensor(range(0, len(branches) * width + 1, width))
        starts, parents = [each.place(0, level) for each in branches], [each.parents() for each in branches]
        slots = self._tensor([text.slot for text in self._drafted])
        attention = self._kv.attention(slots, self._tensor(starts), cu_queries, parents=self._tensor(parents))
        positions = [
            min(each.start + num_accepted + level, self._longest - 1)
            for each in branches
            for num_accepted in each.accepted
        ]
        token_ids = self._tensor([ids[-1] for each in branches for ids in each.tokens])
        last = self._tensor(range(len(positions)))
        likely = iter(self._likely(token_ids, self._tensor(positions), last, attention))
        for each in branches:
            for branch, ids in zip(range(width), likely):  # noqa: B905 - as many as the branch has
                each.likely[branch].append(ids)
                each.tokens[branch].append(ids[0])

    def _likely(
        self, token_ids: Tensor, positions: Tensor, last: Tensor, attention: Mapping[str, Any]
    ) -> list[list[int]]:
        """The likeliest tokens after each of the inputs `last`."""
        logits = self._run(token_ids, positions, last, attention)
        found: list[list[int]] = target_ids(logits.topk(NUM_GUESSES).indices, self._vocabulary).tolist()
        return found

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]] | range) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _is_drafted(text: _Text, length: int) -> bool:
    """Whether there are so many tokens. The one behind those that were run is known."""
    if len(text.ids) < length and text.num_run == len(text.ids):
        text.ids.append(text.likely[text.num_run - 1][0])
    return len(text.ids) >= length


def _num_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The length of their common beginning."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
