"""Drawn drafts from elsewhere, in exact fractions: however an answer may come, the text keeps its distribution.

The example is that of `test_late_and_exact`, and what is enumerated is the code itself. Every pair of drafts is drawn
by a proposer that is served, sent over a socket, and offered by an engine's steps. A way says which answers are held
back. Ways that are not allowed are planted, and found by the same check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction as F
from itertools import product

import pytest
import torch
from drafter_servers import hosted_with, serving
from test_late_and_exact import P1, P2, Q1, Q2, TOKENS, distance, verified

from specdec.adapters.serving.sessions import Limits
from specdec.plugins.remote import conversation as module
from specdec.plugins.remote.connection import ClosedError, Connection
from specdec.plugins.remote.conversation import Conversation
from specdec.plugins.remote.proposer import RemoteOptions
from specdec.plugins.remote.texts import Text
from specdec.sdk import Draft, Needs, ProposerBase, ProposerConfig, RequestView, SamplingView, StrictModel
from specdec.sdk.types import DistributionKind, DraftDistribution
from specdec.sdk.wire import Ask, Drafts
from specdec.testing.fakes import step_view

START = [0, 0]  # a prompt of one token, and the first token behind it
MANY = 1024  # runs, some of which leave their requests behind
CELLS = 5  # every probability of the drafter is a number of fifths


class Options(StrictModel):
    reports: bool = True


class DrawsFifths(ProposerBase):
    """Draws two tokens of three from Q1 and Q2."""

    Options = Options
    needs = Needs(history=True, distributions=("sparse",), sparse_top_m=3, sampling=("temperature",))

    def propose(self, step):
        ids, rows = [], []
        for place, length in enumerate(step.committed_length.tolist()):
            text, told = step.history.token_ids(place), []
            for index in range(2):
                row = Q1 if len(text) == len(START) else Q2[text[-1]]
                cell = int(step.random.uniform(index)[place] * CELLS)
                text.append([token for token in TOKENS for _ in range(int(row[token] * CELLS))][cell])
                told.append([float(each) for each in row])
            ids.append(text[length:])
            rows.append(told)
        draft = Draft.from_lists([each[:n] for each, n in zip(ids, step.budget.tolist(), strict=True)], step.width)
        if not self.config.options.reports:
            return draft
        kind = torch.full((len(ids),), DistributionKind.SPARSE, dtype=torch.uint8)
        told_ids = torch.arange(3).expand(len(ids), 2, 3)
        probs = torch.tensor(rows, dtype=torch.float64)
        return replace(draft, distribution=DraftDistribution(kind=kind, sparse_ids=told_ids, sparse_probs=probs))


@dataclass
class Way:
    """How answers come. By the drafts x1 and x2 of the first step."""

    late: Callable[[int, int], bool] = lambda x1, x2: False
    later: Callable[[int, int], bool] = lambda x1, x2: False  # whether a late answer is there in the next step
    cut: Callable[[int, int], bool] = lambda x1, x2: False  # whether only x1 is in time
    lost: Callable[[int, int], bool] = lambda x1, x2: False  # whether the drafter ends before it answers
    waits: bool = False  # a step goes on only when it has its answer
    reports: bool = True


class Line(Connection):
    """A connection that holds answers back as a way says. In its engine's eyes the time has passed meanwhile."""

    def __init__(self, address: str, way: Way) -> None:
        super().__init__(address)
        self.way = way
        self._owed, self._welcomed = 0, False
        self._held: Drafts | None = None
        self.drafts: list[int] = []  # x1 and x2
        self.step = 1

    def send(self, message):
        super().send(message)
        self._owed += isinstance(message, Ask)

    def receive(self, seconds):
        if self._held is not None:
            if self.way.waits or (self.step == 2 and self.way.later(*self.drafts)):
                held, self._held = self._held, None
                return held
            return None
        if not self._owed:
            welcomed, self._welcomed = self._welcomed, True
            return super().receive(seconds if welcomed else 30)
        answer = super().receive(30)
        assert isinstance(answer, Drafts)
        self._owed -= 1
        return self._as_the_way_says(answer)

    def _as_the_way_says(self, answer):
        if self.drafts:  # of the second step: it is there if steps wait
            return answer if self.way.waits else None
        [row] = answer.rows
        self.drafts = list(row.tokens)
        if self.way.lost(*self.drafts):
            raise ClosedError("it ended")
        if self.way.cut(*self.drafts):
            ids, values = row.distribution.ids, row.distribution.values
            row.tokens.pop()
            row.distribution.ids, row.distribution.values = ids[: len(ids) // 2], values[: len(values) // 2]
        if self.way.late(*self.drafts):
            self._held = answer
            return None
        return answer


class Lines:
    """The place of the server."""

    label = "the drafter"

    def __init__(self, address: str, way: Way) -> None:
        self._address, self._way = address, way
        self.lines: list[Line] = []

    def connect(self, most_bytes):
        self.lines.append(Line(self._address, self._way))
        if len(self.lines) > 1:
            self.lines[-1].drafts = self.lines[0].drafts
        return self.lines[-1]

    def require_own(self): ...

    def has_failed(self):
        return False

    def fate(self, seconds):
        return ""

    def close(self): ...


class Numbers:
    """The uniforms in the middle of cells."""

    def __init__(self, *cells: int) -> None:
        self._cells = cells

    def uniform(self, draft_index):
        return torch.tensor([(self._cells[draft_index] + 0.5) / CELLS], dtype=torch.float64)


class Engine:
    """The steps of an engine with one request."""

    def __init__(self, address, info, way: Way) -> None:
        self.place = Lines(address, way)
        options = RemoteOptions(address=address, deadline_ms=None if way.waits else 0.01)
        config = ProposerConfig(num_draft_tokens=2, options=options, draft_sample_method="probabilistic")
        self._conversation = Conversation(self.place, config, info, DrawsFifths.needs)
        self._conversation.start(RequestView(request_id="a", slot=0, generation=1, prompt_token_ids=START[:1]))

    def step(self, tokens: list[int], *cells: int) -> list[tuple[int, list[F]]]:
        """Drafts behind the tokens, each with what it was drawn from."""
        self.place.lines[-1].step = len(tokens) - len(START) + 1
        shown = step_view([tokens], 2, request_ids=["a"])
        shown = replace(
            shown, random=Numbers(*cells), sampling=SamplingView(temperature=torch.ones(1), all_greedy=False)
        )
        self._conversation.observe(shown)
        draft = self._conversation.propose(shown)
        ids = draft.token_ids[0, : int(draft.lengths[0])].tolist()
        told = draft.distribution
        if told is None:
            return [(token, [F(token == other) for other in TOKENS]) for token in ids]
        assert told.sparse_ids[0, : len(ids)].tolist() == [[0, 1, 2]] * len(ids)
        rows = [[F(p).limit_denominator(100) for p in row] for row in told.sparse_probs[0].tolist()]
        return list(zip(ids, rows, strict=False))

    def close(self) -> None:
        self._conversation.close()


def outcomes(p: list[F], draft: list[tuple[int, list[F]]]) -> Iterator[tuple[int, F, bool]]:
    """What the first place of a draft becomes."""
    if draft:
        yield from verified(p, draft[0][1], draft[0][0])
    else:
        yield from ((token, p[token], False) for token in TOKENS)


def first_two(address, info, way: Way) -> Counter[tuple[int, int]]:
    """The probabilities of the first two output tokens, over all numbers that may be drawn with."""
    found: Counter[tuple[int, int]] = Counter()
    cell = F(1, CELLS)
    for first, second in product(range(CELLS), repeat=2):
        engine = Engine(address, info, way)
        draft = engine.step(START, first, second)
        for y, chance, accepted in outcomes(P1, draft):
            if accepted:
                for z, c, _ in outcomes(P2[y], draft[1:]):
                    found[y, z] += cell * cell * chance * c
                continue
            cells = range(CELLS) if way.waits else [0]  # those of the next step's drafts, where there are any
            for third in cells:
                for z, c, _ in outcomes(P2[y], again(address, info, way, y, first, second, third)):
                    found[y, z] += cell * cell * chance * c / len(cells)
        engine.close()
    return found


def again(address, info, way: Way, y: int, first: int, second: int, third: int) -> list[tuple[int, list[F]]]:
    """The drafts of the second step, behind y."""
    engine = Engine(address, info, way)
    engine.step(START, first, second)
    draft = engine.step([*START, y], third, 0)
    engine.close()
    return draft


class Rebases(Text):
    """Takes what is left of a drawn draft for what is left of a one-hot one."""

    def drafts(self, tokens, length, figures):
        held = self.drawn_from
        self.drawn_from = None
        rest = super().drafts(tokens, length, figures)
        if held is not None and rest:
            tables = {name: each[-len(rest) :] for name, each in held.tables.items()}
            self.drawn_from = replace(held, tables=tables)
        return rest


def always(x1, x2):
    return True


ALLOWED = {
    "waited for": Way(waits=True),
    "waited for, for longer because of what was drawn": Way(late=lambda x1, x2: x1 == 2 or x2 == 1, waits=True),
    "never in time": Way(late=always),
    "late, and there in the next step because of its second token": Way(late=always, later=lambda x1, x2: x2 != 1),
    "the drafter ends, and is there again": Way(lost=always, waits=True),
    "one-hot, late because of its first token": Way(late=lambda x1, x2: x1 == 2, later=always, reports=False),
    "one-hot, there for re-basing because of its second token": Way(
        late=always, later=lambda x1, x2: x2 != 1, reports=False
    ),
}
PLANTED = {
    "a deadline: late because of its first token": (Way(late=lambda x1, x2: x1 == 2), Text, 0.080),
    "handed over by the token: the second late because of itself": (Way(cut=lambda x1, x2: x2 == 1), Text, 0.073),
    "re-based: there in the next step because of its second token": (
        Way(late=always, later=lambda x1, x2: x2 != 1),
        Rebases,
        0.033,
    ),
    "the drafter ends because of its first token": (Way(lost=lambda x1, x2: x1 == 2), Text, 0.080),
}


@pytest.fixture
def info_and_address(request, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.plugins.remote.drafter.logger.disabled", True)  # every run loses a drafter
    config = {"method": f"{__name__}:DrawsFifths", "num_speculative_tokens": 2}
    config |= {"draft_sample_method": "probabilistic", "proposer_config": {"reports": request.param}}
    hosted = hosted_with(config, max_num_seqs=MANY, vocab_size=3)
    with serving(hosted, f"ipc://{tmp_path}/socket", Limits(max_sessions=MANY)) as server:
        yield hosted.info, server.address


def parametrized(ways, reports):
    cases = [pytest.param(reports[name], name, id=name) for name in ways]
    return pytest.mark.parametrize(("info_and_address", "name"), cases, indirect=["info_and_address"])


@parametrized(ALLOWED, {name: way.reports for name, way in ALLOWED.items()})
def test_however_answers_may_come_the_text_keeps_its_distribution(info_and_address, name) -> None:
    info, address = info_and_address
    assert distance(first_two(address, info, ALLOWED[name])) == 0


@parametrized(PLANTED, dict.fromkeys(PLANTED, True))
def test_ways_that_are_not_allowed_are_found(info_and_address, name, monkeypatch) -> None:
    info, address = info_and_address
    way, text, expected = PLANTED[name]
    monkeypatch.setattr(module, "Text", text)
    assert float(distance(first_two(address, info, way))) == pytest.approx(expected, abs=5e-4)
