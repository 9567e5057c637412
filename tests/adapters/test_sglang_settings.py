"""What SGLang is told of a proposer: by the environment, and beside it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from specdec.adapters.sglang.settings import VARIABLE, read_settings, refuse_plan
from specdec.sdk import ConfigError, Refusal

PLAN = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "disaggregation_mode": "null"}


@pytest.fixture
def told(monkeypatch):
    """Reads settings that the environment holds."""

    def told(num_verified, **values):
        monkeypatch.setenv(VARIABLE, json.dumps(values))
        return read_settings(num_verified)

    return told


def test_one_draft_less_is_made_than_sglang_verifies_and_errors_end_nothing(told):
    config = told(5, method="ngram")
    assert (config.method, config.num_speculative_tokens, config.on_proposer_error) == ("ngram", 4, "disable")
    assert told(2, method="ngram", on_proposer_error="skip_step").on_proposer_error == "skip_step"
    assert told(2, method="ngram").num_speculative_tokens == 1


@pytest.mark.parametrize("num_verified", [None, 1, 0])
def test_without_a_draft_to_verify_the_argument_is_asked_for(num_verified, told):
    with pytest.raises(ConfigError, match="SD-E133") as raised:
        told(num_verified, method="ngram")
    assert "--speculative-num-draft-tokens" in raised.value.facts["fix"]


def test_what_sglang_decides_is_not_said_twice(told):
    with pytest.raises(ConfigError, match="SD-E196"):
        told(5, method="ngram", num_speculative_tokens=4)
    with pytest.raises(Refusal, match="a rule of its own"):
        told(5, method="ngram", rejection_sample_method="block")
    assert told(5, method="ngram", rejection_sample_method="standard").num_speculative_tokens == 4


def test_a_proposer_is_asked_for_by_the_name_of_the_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="SD-E133") as raised:
        read_settings(5)
    assert raised.value.facts["variable"] == VARIABLE


@pytest.mark.parametrize("other", [{"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}, {"disaggregation_mode": "prefill"}])
def test_ways_to_run_that_were_not_tried_are_refused(other):
    refuse_plan(SimpleNamespace(**PLAN))
    with pytest.raises(Refusal, match="not tried"):
        refuse_plan(SimpleNamespace(**PLAN | other))
