"""Figures that a proposer publishes of itself: seen beside the engine's, and harmless where they are wrong."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY

from specdec import LLM
from specdec.sdk import Draft
from specdec.sdk.combinators import Chain


class Counting:
    """Drafts nothing, and counts how often it was asked."""

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
