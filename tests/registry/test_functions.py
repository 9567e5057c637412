"""Functions that distributions offer by name: datasets for the lab, exporters of metrics, verification rules."""

import re
import sys

import pytest

from specdec import LLM
from specdec.core.registry import PluginSettings
from specdec.core.registry.functions import call_offered
from specdec.core.request.metrics import Counter, Vector
from specdec.lab.datasets import PromptRow, load_dataset
from specdec.sdk import ConfigError
from specdec.sdk.errors import PluginLoadError

METRICS = [
    Counter("specdec:steps", 3, {"model_name": 'a "b"'}),
    Vector("specdec:accepted", (2, 1), {"engine": "0"}),
    Counter("specdec:steps", 4, {"model_name": "c"}),
]


@pytest.fixture
def offer(install, write_module):
    """Install a distribution with a module of this source, whose `given` it offers under a name in a group."""

    def offer(kind, name, source, dist="dist-f", module="f_mod", target="given"):
        install(dist, "0.3.1", others={f"specdec.{kind}": [f"{name} = {module}:{target}"]})
        return write_module(module, source)

    return offer


def export(name, settings=None):
    return call_offered("metrics_exporters", name, METRICS, str, settings or PluginSettings(), ())


def rows(body):
    return f"def given(path):\n    {body}\n"


def test_a_dataset_is_read_by_name_and_by_its_distribution(offer, tmp_path):
    body = "yield {'prompt': f'Ode to {path}', 'category': 'c'}; yield {'prompt': 'b'}"
    offer("datasets", "odes", rows(body))
    expected = [PromptRow("1", "c", f"Ode to {tmp_path}"), PromptRow("2", "all", "b")]
    assert load_dataset("odes", tmp_path) == load_dataset("dist-f:odes", tmp_path) == expected


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        ("yield {}['poem']", PluginLoadError, "dist-f:odes 0.3.1"),
        ("return None", PluginLoadError, "dist-f:odes 0.3.1"),
        ("return [{'text': 'a'}]", ConfigError, "dataset odes, row 1: a row has one of prompt"),
        ("return ['a']", ConfigError, "dataset odes, row 1: not an object"),
        ("return [{'prompt': 'a', 'prompt_id': 1}] * 2", ConfigError, "two prompts have the id '1'"),
        ("return []", ConfigError, "'dataset odes' holds no prompt"),
    ],
    ids=["raises", "nothing", "key", "text", "ids", "empty"],
)
def test_a_dataset_that_fails_is_attributed(offer, body, error, told):
    offer("datasets", "odes", rows(body))
    with pytest.raises(error, match=re.escape(told)):
        load_dataset("odes", None)


def test_an_unknown_dataset_is_told_what_is_offered(offer):
    offer("datasets", "odes", "raise RuntimeError('imported')")
    with pytest.raises(
        ConfigError, match=r"(?s)SD-E132.*no such dataset.*did you mean  odes.*packaged, custom, .*, odes"
    ):
        load_dataset("ode", None)


def test_an_exporter_gets_the_metrics(offer):
    offer("metrics_exporters", "lines", "def given(metrics): return '+'.join(metric.name for metric in metrics)")
    assert export("lines") == "specdec:steps+specdec:accepted+specdec:steps"
    with LLM("tiny", max_model_len=64) as llm:
        assert "specdec:spec_decode_num_drafts" in llm.export_metrics("lines").split("+")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def given(metrics): 1 / 0", r'SD-E118 the metrics exporter "lines" raised ZeroDivisionError'),
        ("given = 3", r'SD-E118 the metrics exporter "lines" cannot be called.*found +3'),
        ("gven = str", r'SD-E102 cannot load metrics exporter "lines".*did you mean +f_mod:gven'),
        ("1 / 0", r"SD-E103 importing the metrics exporter"),
    ],
)
def test_an_exporter_that_fails_is_attributed(offer, source, told):
    offer("metrics_exporters", "lines", source)
    with pytest.raises(PluginLoadError, match=rf"(?s){told}") as caught:
        export("lines")
    assert "dist-f:lines 0.3.1" in str(caught.value)


def test_a_name_that_two_distributions_offer_is_refused_until_its_distribution_is_named(offer):
    for number in (1, 2):
        source = f"def given(metrics): return '{number}'"
        offer("metrics_exporters", "lines", source, f"dist-{number}", f"f{number}")
    with pytest.raises(PluginLoadError, match=r'(?s)SD-E112 the name "lines" is offered 2 times.*dist-1:lines'):
        export("lines")
    assert export("dist-2:lines") == "2"


def test_what_is_blocked_is_not_imported(offer):
    offer("metrics_exporters", "lines", "raise RuntimeError('imported')")
    told = r'SD-E104 the metrics exporter "lines" is blocked.*choose another metrics exporter'
    with pytest.raises(PluginLoadError, match=rf"(?s){told}"):
        export("lines", PluginSettings(deny=frozenset({"dist-f"})))


def test_an_unknown_exporter_is_told_what_is_offered(offer):
    offer("metrics_exporters", "lines", "")
    with pytest.raises(ConfigError, match=r"(?s)SD-E132.*did you mean  lines.*lines, prometheus"):
        export("line")


RULE = """
from specdec.core.rejection import verify

def given(config):
    def rule(logits, cu_rows, drafts, sampling, *, workspace=None):
        asked.append(config.num_speculative_tokens)
        return verify(logits, cu_rows, drafts, sampling, workspace=workspace)
    return rule

asked = []
"""


def test_a_stranger_offers_a_verification_rule_and_its_user_is_warned(offer, caplog):
    offer("verification_rules", "lenient", RULE)
    settings = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "lenient"}
    with LLM("tiny", speculative_config=settings) as llm:
        llm.generate(["1 2 3 1 2 3 1 2"])
    assert set(sys.modules["f_mod"].asked) == {3}
    assert "SD-W302" in caplog.text


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def given(config): return 3", r'SD-E118 the verification rule "lenient" raised TypeError.*this is 3'),
        ("def given(config): 1 / 0", r'SD-E118 the verification rule "lenient" raised ZeroDivisionError'),
    ],
)
def test_a_verification_rule_that_fails_is_attributed(offer, source, told):
    offer("verification_rules", "lenient", source)
    settings = {"method": "ngram", "rejection_sample_method": "lenient"}
    with pytest.raises(PluginLoadError, match=rf"(?s){told}"):
        LLM("tiny", speculative_config=settings)
