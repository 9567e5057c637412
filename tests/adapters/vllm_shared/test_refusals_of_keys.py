"""What of vLLM's `speculative_config` is refused beside a class of ours, and how its methods are wrapped."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from specdec.adapters.vllm_shared.ignored_keys import refuse_ignored
from specdec.adapters.vllm_shared.wrapping import wrap
from specdec.adapters.vllm_v2.wrong_class import refuse_wrong_class
from specdec.sdk import ConfigError

OURS = "specdec.adapters.vllm.ngram"


@dataclass
class Written:
    """Fields of vLLM's SpeculativeConfig, with its defaults."""

    model: str | None = None
    method: str | None = None
    num_speculative_tokens: int | None = None
    enforce_eager: bool | None = None
    quantization: str | None = None
    prompt_lookup_max: int | None = None
    disable_padded_drafter_batch: bool = False


def test_keys_that_are_read_or_ask_for_what_is_so_are_accepted():
    refuse_ignored(Written(model=OURS, method="custom_class", num_speculative_tokens=3, enforce_eager=True))


def test_each_key_that_nobody_reads_is_named_with_where_it_belongs():
    with pytest.raises(ConfigError, match="SD-E215") as raised:
        refuse_ignored(Written(OURS, quantization="fp8", prompt_lookup_max=4, disable_padded_drafter_batch=True))
    assert raised.value.facts == {
        "quantization='fp8'": 'additional_config["specdec"]["quantization"]',
        "prompt_lookup_max=4": 'additional_config["specdec"]["proposer_config"]["prompt_lookup_max"]',
        "disable_padded_drafter_batch=True": "leave it out: vLLM's own drafters alone read it",
    }


@pytest.mark.parametrize("method", [None, "custom_class"])
def test_a_class_of_ours_is_taken_alone_or_with_the_method_that_runs_it(method):
    refuse_wrong_class(SimpleNamespace(model=OURS, method=method))


@pytest.mark.parametrize(
    ("model", "method", "told"),
    [(OURS, "ngram", "names a method beside the class"), ("specdec.plugins.ngram", None, "no class of the adapter")],
)
def test_what_vllm_would_run_as_another_method_or_class_is_refused(model, method, told):
    with pytest.raises(ConfigError, match=f"SD-E215[\\s\\S]*{told}"):
        refuse_wrong_class(SimpleNamespace(model=model, method=method))


def test_a_checkpoint_is_none_of_our_classes():
    refuse_wrong_class(SimpleNamespace(model="organisation/specdec", method="eagle"))


class Drafter:
    """Ours."""


class Runner:
    """vLLM's."""

    def step(self, number, *, more=0):
        """Count."""
        return number + more


def test_a_wrapped_method_is_replaced_where_the_drafter_is_ours_alone():
    def replacement(drafter, original, runner, number, **given):
        return drafter, original(runner, number, **given)

    wrap(Runner, "step", replacement, "drafter", Drafter)
    runner = Runner()
    assert runner.step(1, more=2) == 3, "a runner without a drafter"
    runner.drafter = object()
    assert runner.step(1, more=2) == 3
    runner.drafter = Drafter()
    assert runner.step(1, more=2) == (runner.drafter, 3)
    assert Runner.step.__doc__ == "Count."
