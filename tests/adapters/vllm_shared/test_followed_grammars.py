"""Grammars of vLLM's requests in a worker: what they force, behind which tokens, and those that nobody can follow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tool_calls import CALL

from specdec import SamplingParams
from specdec.adapters.vllm_shared.followed_grammars import KINDS, FollowedGrammars
from specdec.core.request.request import FinishReason, Request

BEGINS = '{"function_name": "'


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return FollowedGrammars(tokenizer, len(tokenizer), compact=True)


def asking(backend="xgrammar", **form):
    """As vLLM's StructuredOutputsParams, for which the backend was chosen."""
    return SimpleNamespace(**dict.fromkeys(KINDS) | form, _backend=backend)


def started(grammars, asked, name="a"):
    request = Request(name, [1, 2], SamplingParams(max_tokens=100), 0, 102, frozenset([0]), None)
    grammars.start(request, asked)
    return request


def test_json_is_as_compact_as_vllm_was_asked_to_make_it(grammars, tokenizer):
    request = started(grammars, asking(json=CALL))
    assert request.grammar.forced() == '{"function_name":"'
    spaced = started(FollowedGrammars(tokenizer, len(tokenizer), compact=False), asking(json=CALL))
    assert spaced.grammar.forced() == "{", "whitespace may follow"


def test_a_grammar_goes_along_with_committed_tokens_and_begins_again_behind_those_that_are_left(grammars, tokenizer):
    request = started(grammars, asking(json=CALL))
    ids = tokenizer.encode('{"function_name":"search', add_special_tokens=False)
    request.commit(ids)
    assert grammars.of("a").forced() == '_flights","arguments":{"destination_city":"'
    del request.token_ids[-1:]
    grammars.restart(request)
    assert grammars.of("a").forced().startswith(tokenizer.decode(ids[-1:]))
    assert request.finish_reason is None


def test_a_token_that_is_refused_all_the_same_ends_drafts_and_nothing_else(grammars, tokenizer):
    request = started(grammars, asking(regex="yes"))
    request.commit(tokenizer.encode("no", add_special_tokens=False))
    assert request.finish_reason == FinishReason.ERROR, "the driver asks for no drafts of a request that has ended"


def test_requests_without_a_grammar_have_none(grammars):
    request = started(grammars, None)
    grammars.restart(request)
    assert request.grammar is None
    assert grammars.of("a") is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (asking("guidance", json={"type": "integer", "multipleOf": 2}), '"guidance"; workers do not'),
        (asking(regex="(["), "cannot be compiled"),
        (asking(structural_tag='{"structures": [], "triggers": []}'), "cannot be compiled"),
        (asking(), "exactly one of"),
    ],
)
def test_what_cannot_be_followed_is_said_and_costs_the_request_nothing(grammars, caplog, asked, reason):
    request = started(grammars, asked)
    assert request.grammar is None
    assert reason in caplog.text
    assert "the proposer is not told of this grammar" in caplog.text
