"""What a request tells the proposer: validated before it runs, seen by `on_start`, kept apart by namespace."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY, make_llm, tokens
from inside import proposer_of

from specdec import LLM
from specdec.sdk import Draft, ProposerConfig, StrictModel
from specdec.sdk.combinators import Chain
from specdec.sdk.errors import PluginLoadError, RequestError


class Watching:
    """Drafts nothing, and notes what `on_start` and `on_finish` are shown."""

    class RequestOptions(StrictModel):
        limit: int = 3
        words: tuple[str, ...] = ()

    def __init__(self, config: ProposerConfig) -> None:
        self.seen = []

    def on_start(self, request):
        self.seen.append(request)

    def on_finish(self, request):
        self.seen.append(request)

    def propose(self, step):
        return Draft.from_lists([[]] * len(step), step.width)


class Unaware(Watching):
    RequestOptions = None


class Both(Chain):
    parts = (Watching, Unaware)


class Demanding(Watching):
    class RequestOptions(StrictModel):
        limit: int


class Loose(Watching):
    RequestOptions = 3


def engine(cls):
    config = {"method": f"{__name__}:{cls.__name__}", "num_speculative_tokens": 2}
    return LLM("tiny", speculative_config=config, max_model_len=128)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[Watching.__module__])


def served(cls, **params):
    llm = engine(cls)
    llm.generate({"prompt_token_ids": [5, 6]}, GREEDY.replace(max_tokens=2, **params))
    return llm


def test_options_are_an_instance_of_the_declared_model():
    for shown in proposer_of(served(Watching, extra_args={"specdec": {"limit": 7}}, namespace="a")).seen:
        assert shown.options == Watching.RequestOptions(limit=7)
        assert shown.namespace == "a"


def test_a_request_that_says_nothing_gets_the_defaults():
    for shown in proposer_of(served(Watching)).seen:
        assert shown.options == Watching.RequestOptions()
        assert shown.namespace == ""


def test_without_a_model_there_are_no_options():
    for shown in proposer_of(served(Unaware, extra_args={"specdec": {"anything": [1]}})).seen:
        assert shown.options is None


def test_parts_see_their_own_section():
    first, second = proposer_of(served(Both, extra_args={"specdec": {"watching": {"limit": 9}}})).members
    for shown in first.proposer.seen:
        assert shown.options == Watching.RequestOptions(limit=9)
    for shown in second.proposer.seen:
        assert shown.options is None


@pytest.mark.parametrize(
    ("cls", "section", "words"),
    [
        (Watching, 7, "expected  a mapping"),
        (Watching, {"limt": 1}, "did you mean 'limit'?"),
        (Watching, {"limit": "many"}, "found 'many'"),
        (Both, {"watching": {"limit": None}}, "limit  Input should be"),
        (Both, {"unaware": {}}, "unaware"),
    ],
)
def test_a_wrong_request_is_refused_by_name_and_touches_nobody(cls, section, words):
    llm = engine(cls)
    good = llm.engine.add_request([5, 6], GREEDY.replace(max_tokens=3), "good")
    with pytest.raises(RequestError, match=r"request 'bad': extra_args\[\"specdec\"\]") as caught:
        llm.engine.add_request([5, 6], GREEDY.replace(extra_args={"specdec": section, "others": 1}), "bad")
    assert caught.value.code == "SD-E270"
    assert words in str(caught.value)
    assert f":{cls.__name__}" in str(caught.value)
    request = llm.engine.get_request(good)
    while llm.engine.step():
        pass
    assert len(request.output_token_ids) == 3


@pytest.mark.slow
def test_an_option_that_stands_beside_the_section_is_refused_with_its_place():
    with pytest.raises(RequestError, match=r"(?s)beside extra_args.*fix +extra_args\[\"specdec\"\]\['limit'\]"):
        served(Watching, extra_args={"limit": 7})


@pytest.mark.parametrize(("cls", "words"), [(Demanding, "limit"), (Loose, "StrictModel")])
def test_unusable_models_are_refused_at_load(cls, words):
    with pytest.raises(PluginLoadError, match=words) as caught:
        engine(cls)
    assert caught.value.code == "SD-E271"


def test_plain_decoding_reads_no_extra_args():
    prompt = {"prompt_token_ids": [5, 6, 7]}
    llm = make_llm()
    plain = tokens(llm.generate(prompt, GREEDY))
    assert (
        tokens(llm.generate(prompt, GREEDY.replace(extra_args={"specdec": {"limit": "many"}}, namespace="b"))) == plain
    )
