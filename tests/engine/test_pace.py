"""The warning that a proposer costs more than it saves comes when it does, once, and never when it pays."""

from __future__ import annotations

import time

import pytest

from specdec import LLM, SamplingParams
from specdec.core.proposing import pace
from specdec.core.proposing.pace import NUM_OUTLIERS, WINDOW, Pace
from specdec.sdk import HostProposer
from specdec.sdk.errors import PluginId
from specdec.sdk.hooks import StepStats


def stats(num_requests=4, num_drafts=12, num_committed=4, num_prompt_tokens=0):
    return StepStats(
        step=1,
        num_requests=num_requests,
        num_tokens_computed=num_requests + num_drafts + num_prompt_tokens,
        num_drafts=num_requests,
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_committed - num_requests,
        num_committed_tokens=num_committed,
    )


@pytest.fixture
def warnings_after(caplog):
    def warnings_after(num_steps, step, seconds, draft_seconds):
        pace = Pace(PluginId("mine", "mypkg:Mine", "dist-x", "1.0"))
        for _ in range(num_steps):
            pace.record(step, seconds, draft_seconds)
        return [record.getMessage() for record in caplog.records]

    return warnings_after


def test_drafts_that_save_nothing_are_told_of_once(warnings_after):
    (message,) = warnings_after(5 * WINDOW, stats(), 0.010, 0.005)
    assert "SD-W301" in message
    assert "[dist-x:mine 1.0]" in message
    assert "draft 5.0 ms, the rest 5.0 ms, 1.00 tokens per request" in message
    assert "2.00 tokens at this draft time, or none: no draft was accepted" in message


def test_the_draft_time_that_would_pay_is_told(warnings_after):
    (message,) = warnings_after(WINDOW, stats(num_committed=5), 0.010, 0.005)
    assert "2.00 tokens at this draft time, or a draft time of 1.2 ms at these tokens" in message


@pytest.mark.parametrize(
    ("step", "seconds", "draft_seconds"),
    [
        (stats(num_committed=8), 0.010, 0.005),  # two tokens for twice the time
        (stats(num_committed=12), 0.010, 0.006),  # three for 2.5 times
        (stats(), 0.0102, 0.0002),  # nothing saved, next to nothing spent
    ],
    ids=["even", "pays", "cheap"],
)
def test_a_proposer_that_pays_or_hardly_costs_is_left_alone(warnings_after, step, seconds, draft_seconds):
    assert warnings_after(5 * WINDOW, step, seconds, draft_seconds) == []


def test_it_takes_a_whole_window(warnings_after):
    assert warnings_after(WINDOW - 1, stats(), 0.010, 0.009) == []


def test_steps_with_prompts_do_not_count(warnings_after):
    assert warnings_after(5 * WINDOW, stats(num_prompt_tokens=100), 0.010, 0.009) == []


def test_a_few_slow_steps_do_not_count(caplog):
    """Compiling a draft network takes seconds, once."""
    pace = Pace(PluginId("mine", "mypkg:Mine", "dist-x", "1.0"))
    for step in range(2 * WINDOW):
        is_slow = step in range(10, 10 + NUM_OUTLIERS)
        pace.record(stats(num_committed=8), *((20.0, 19.9) if is_slow else (0.010, 0.002)))
    assert not caplog.records
    for step in range(WINDOW):
        pace.record(stats(num_committed=8), *((0.030, 0.025) if step % 8 == 0 else (0.010, 0.0075)))
    assert len(caplog.records) == 1


class Dawdling(HostProposer):
    """Takes long, and drafts what is hardly ever right."""

    def draft(self, request, tokens, k):
        """The same tokens whatever the text."""
        time.sleep(0.02)
        return [7] * k


def test_an_engine_says_it_of_the_proposer_that_it_runs(caplog, monkeypatch):
    monkeypatch.setattr(pace, "WINDOW", 2 * NUM_OUTLIERS)
    llm = LLM("tiny", speculative_config={"method": f"{__name__}:Dawdling", "num_speculative_tokens": 2})
    llm.generate("def f(", SamplingParams(temperature=0, max_tokens=4 * NUM_OUTLIERS, ignore_eos=True))
    assert sum("SD-W301" in record.getMessage() for record in caplog.records) == 1
