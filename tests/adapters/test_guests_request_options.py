"""`extra_args` of vLLM's requests: what is read of them, and what is refused with our words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specdec import SamplingParams
from specdec.adapters.request_options import RequestLimits, read_request, sampled_alike
from specdec.core.registry import LoadedProposer
from specdec.sdk import StrictModel
from specdec.sdk.errors import PluginId, RequestError
from specdec.sdk.request_options import read_request_options

PLUGIN = PluginId("mine", "mine:Mine", "my-dist", "1.2")


class Options(StrictModel):
    """Of a proposer."""

    least: int = 3
    words: tuple[str, ...] = ()


def read(extra_args, model=Options):
    loaded = SimpleNamespace(plugin=PLUGIN, request_options=model)
    loaded.read_request = lambda args, name: LoadedProposer.read_request(loaded, args, name)
    return read_request(loaded, extra_args, "r1")


@pytest.mark.parametrize(
    "extra_args",
    [
        {"specdec": {"num_speculative_tokens": 2, "least": 5}},
        {"specdec": '{"num_speculative_tokens": 2, "least": 5}'},
        {"specdec": '{"num_speculative_tokens": 2, "least": 5}', "kv_transfer_params": {"somebody": "else"}},
    ],
)
def test_a_mapping_and_its_json_say_the_same_beside_what_is_somebody_elses(extra_args):
    options, limits = read(extra_args)
    assert limits == RequestLimits(num_speculative_tokens=2)
    assert options == read_request_options(Options, {"specdec": {"least": 5}}, "r1", PLUGIN)


def test_a_request_that_says_nothing_gets_the_defaults():
    assert read(None) == read({}) == read({"specdec": "{}"}) == (Options(), RequestLimits())
    assert read({"anything": 1}, model=None) == (None, RequestLimits())


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{", "this text is no JSON"),
        ("[1]", "found list"),
        (7, "found int"),
        ("x" * 5000, "this text is no JSON"),
        ({"speculativ": False}, "did you mean 'speculative'?"),
        ({"leest": 1}, "did you mean 'least'?"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"least": "many"}, "least"),
        ('{"words": []}', "beside extra_args"),
    ],
)
def test_what_is_wrong_is_refused_by_name_and_without_raw_validation_text(section, said):
    beside = {"least": 5} if said == "beside extra_args" else {}
    with pytest.raises(RequestError) as error:
        read({"specdec": section} | beside)
    text = str(error.value)
    assert error.value.code == "SD-E270"
    assert said in text
    assert "'r1'" in text
    assert "[my-dist:mine 1.2]" in text
    assert len(text) < 1000
    assert "validation error" not in text
    assert "pydantic" not in text


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_tokens": 7, "top_k": -1}, {"max_tokens": 7, "top_k": 0}),
        *(
            (beyond, {"max_tokens": 2**63 - 1, "speculative": False})
            for beyond in ({"top_k": 2**31}, {"top_p": 1e-40}, {"temperature": 1e9}, {"temperature": float("nan")})
        ),
    ],
)
def test_sampling_that_an_engine_has_accepted_ends_nothing_here(theirs, ours):
    assert sampled_alike("r1", PLUGIN, **theirs) == SamplingParams(**ours)
