"""Figures that a proposer publishes of itself: seen beside the engine's, and harmless where they are wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_helpers import GREEDY
from inside import proposer_of

from specdec import LLM
from specdec.core.request.metrics import RequestMetrics
from specdec.sdk import Draft, Needs
from specdec.sdk.combinators import Chain
from specdec.sdk.extensions import Metrics


class Counting:
    """Drafts nothing, and counts how often it was asked."""

    needs = Needs(extensions=(Metrics(),))
    published = None

    def __init__(self, config):
        self.asked = 0

    def propose(self, step):
        self.asked += 1
        return Draft.from_lists([[] for _ in range(len(step))], step.width)

    def metrics(self):
        if isinstance(self.published, Exception):
            raise self.published
        return {"asked": self.asked} if self.published is None else self.published


class AskedMeanwhile(Counting):
    """Its figures are read by another thread in the middle of each step."""

    def __init__(self, config):
        super().__init__(config)
        self.threads = set()  # on which it was asked for figures
        self.seen = []  # how often it had been asked for drafts, and what a reader saw then

    def propose(self, step):
        with ThreadPoolExecutor(1) as reader:
            self.seen.append((self.asked, reader.submit(self.read).result()))
        return super().propose(step)

    def read(self):
        (value,) = [each.value for each in self.llm.get_metrics() if each.name.endswith("_asked")] or [None]
        return value

    def metrics(self):
        self.threads.add(threading.get_ident())
        return super().metrics()


class Both(Chain):
    parts = (Counting,)


def run(proposer):
    with LLM("tiny", speculative_config={"method": f"{__name__}:{proposer}", "num_speculative_tokens": 2}) as llm:
        llm.generate(["def f("], GREEDY.replace(max_tokens=4))
        shown = {metric.name: metric for metric in llm.get_metrics()}
        return shown, llm.export_metrics()


@pytest.mark.parametrize(("proposer", "name"), [("Counting", "counting_asked"), ("Both", "both_counting_asked")])
def test_a_figure_is_shown_and_exported_under_the_proposers_name(proposer, name):
    shown, text = run(proposer)
    metric = shown[f"specdec:proposer_{name}"]
    assert metric.value == shown["specdec:proposer_propose_calls"].value > 0
    assert metric.labels["proposer"].endswith(proposer)
    assert f"# TYPE specdec:proposer_{name} gauge" in text
    assert f"\nspecdec:proposer_{name}{{" in text


def test_figures_are_asked_for_between_steps_and_a_reader_sees_the_last_answer():
    config = {"method": f"{__name__}:AskedMeanwhile", "num_speculative_tokens": 2}
    with LLM("tiny", speculative_config=config) as llm:
        proposer = proposer_of(llm)
        proposer.llm = llm
        llm.generate(["def f("], GREEDY.replace(max_tokens=5))
        assert proposer.seen == [(0, None), (1, 1), (2, 2)], "each question is answered behind its step"
        assert proposer.threads == {threading.get_ident()}
        assert proposer.read() == 3


def test_the_last_figures_are_those_of_the_end():
    llm = LLM("tiny", speculative_config={"method": f"{__name__}:Counting", "num_speculative_tokens": 2})
    llm.generate(["def f("], GREEDY.replace(max_tokens=4))
    llm.close()
    assert {each.name: each for each in llm.get_metrics()}["specdec:proposer_counting_asked"].value == 2


@pytest.mark.parametrize(
    ("published", "code"),
    [
        ({"Hit rate": 1}, "SD-E230"),
        ({"rate": float("nan")}, "SD-E230"),
        ({"on": True}, "SD-E230"),
        ([1, 2], "SD-E230"),
        (RuntimeError("no figures"), "SD-E210"),
    ],
)
def test_what_cannot_be_shown_is_counted_and_everything_else_is_shown(published, code, monkeypatch, caplog):
    monkeypatch.setattr(Counting, "published", published)
    shown, text = run("Counting")
    assert not any(name.startswith("specdec:proposer_counting") for name in shown)
    assert shown["specdec:num_steps"].value == 4
    assert f'code="{code}"' in text
    assert code in caplog.text


def test_positions_are_counted_while_another_thread_records():
    metrics = RequestMetrics()
    thread = threading.Thread(target=lambda: [metrics.record(3, accepted, 1) for accepted in range(50_000)])
    thread.start()
    while thread.is_alive():
        assert sum(metrics.drafted_per_position) % 3 == 0
    assert metrics.drafted_per_position == [50_000] * 3
