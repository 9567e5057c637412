"""A real server, started by the command of the how-to, and a real client: texts, streams, aborts, options, refusals."""

from __future__ import annotations

import asyncio
import json

import pytest
from served_vllm import until

pytestmark = pytest.mark.full

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n"
NO_DRAFTS = {"vllm_xargs": {"specdec": '{"speculative": false}'}}
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"


def drafted(server, call):
    """How many tokens were drafted for a request that runs alone, and its answer."""
    until(lambda: server.metric("vllm:num_requests_running") == 0, "it was idle", server.alive)
    before = server.metric(DRAFTED)
    answer = call()
    return server.metric(DRAFTED) - before, answer


def text_of(answer):
    return answer.choices[0].text


def test_the_documented_server_answers_with_drafts_what_it_answers_without(documented_server, ask):
    with_drafts, answer = drafted(documented_server, lambda: ask(PROMPT))
    without, plain = drafted(documented_server, lambda: ask(PROMPT, extra_body=NO_DRAFTS))
    assert text_of(answer) == text_of(plain) != ""
    assert answer.usage.completion_tokens == plain.usage.completion_tokens == 32
    assert with_drafts > 0
    assert without == 0


def test_a_stream_says_the_same_text_in_pieces(ask):
    pieces = [text_of(each) for each in ask(PROMPT, stream=True)]
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(ask(PROMPT))


def test_streams_that_are_left_end_and_the_next_request_is_served(documented_server, ask):
    whole = text_of(ask(PROMPT))
    for _ in range(5):
        stream = ask(PROMPT, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
        next(stream)
        stream.close()
    until(lambda: documented_server.metric("vllm:num_requests_running") == 0, "they ended", documented_server.alive)
    assert text_of(ask(PROMPT)) == whole


def test_twenty_at_a_time_get_the_texts_that_they_get_alone(openai, documented_server, ask):
    prompts = [f"{PROMPT}# {number}\n" for number in range(20)]
    lengths = [4 + 3 * (number % 10) for number in range(20)]

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{documented_server.url}/v1", api_key="none", timeout=300) as client:
            calls = [
                client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            return [text_of(each) for each in await asyncio.gather(*calls)]

    alone = [text_of(ask(prompt, max_tokens=length)) for prompt, length in zip(prompts, lengths, strict=True)]
    assert asyncio.run(together()) == alone


@pytest.mark.parametrize("stream", [False, True])
def test_options_of_a_request_are_json_over_http(documented_server, ask, stream):
    asked = {"specdec": json.dumps({"num_speculative_tokens": 1})}

    def call():
        answer = ask(PROMPT, stream=stream, extra_body={"vllm_xargs": asked})
        return list(answer) if stream else answer

    few, _ = drafted(documented_server, call)
    most, _ = drafted(documented_server, lambda: ask(PROMPT))
    assert 0 < few < most


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('{"num_speculative_tokens": "many"}', "num_speculative_tokens"),
        ('{"speculativ": false}', "did you mean 'speculative'?"),
        ("{speculative: false}", "this text is no JSON"),
        ("[2]", "found list"),
        (2, "found int"),
    ],
)
def test_an_option_that_is_wrong_is_answered_with_status_400_and_our_words(openai, ask, section, said):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(PROMPT, extra_body={"vllm_xargs": {"specdec": section}})
    text = refused.value.body["message"]
    assert refused.value.status_code == 400
    assert "SD-E270" in text
    assert said in text
    assert "validation error" not in text
    assert text_of(ask(PROMPT, max_tokens=2)), "the server goes on"


@pytest.mark.parametrize("asked", [{"logit_bias": {"5": 1.0}}, {"temperature": 1, "extra_body": {"min_p": 0.1}}])
def test_v1_answers_400_to_what_vllm_cannot_combine_with_speculation(openai, ask, asked):
    with pytest.raises(openai.BadRequestError, match="min_p and logit_bias"):
        ask(PROMPT, **asked)
