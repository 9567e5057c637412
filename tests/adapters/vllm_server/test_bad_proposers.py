"""A real server whose proposer raises, returns nonsense or hangs: nothing hangs for ever, and nothing is silent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from served_vllm import client_of, until
from vllm_process import with_interpreted_triton

pytestmark = pytest.mark.full

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n"
PLAIN = {"extra_body": {"vllm_xargs": {"specdec": '{"speculative": false}'}}}
ENABLED, CALL_SECONDS = "specdec:proposer_enabled", "specdec:proposer_call_seconds"
ERRORS, DRAFTED = "specdec:spec_decode_proposer_errors_total", "specdec:spec_decode_num_draft_tokens_total"
PLUGIN = "served_proposers:Faulty"


class Faulty:
    """A server of the proposer, and its fault."""

    def __init__(self, openai, server, file, max_tokens):
        self.server, self._file, self._max_tokens = server, file, max_tokens
        self._ask = client_of(openai, server)

    def has(self, fault):
        self._file.write_text(fault)

    def text(self, **asked):
        return self._ask(PROMPT, max_tokens=self._max_tokens, **asked).choices[0].text

    def works(self):
        """Ask until it drafts again: it is asked after so many steps, and what it counts is shown a second later."""
        self.has("")
        before = self.server.metric(DRAFTED) or 0

        def drafts():
            self.text()
            return self.server.metric(ENABLED) == 1 and self.server.metric(DRAFTED) > before

        until(drafts, "it drafts", self.server.alive)


STEPS = {"V1": (32, 100), "V2": (8, 6)}  # of a text, and while it is off; interpreted kernels take seconds a step


@pytest.fixture(scope="module", params=STEPS)
def server(request, started, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    file = folder / "fault"
    file.write_text("")
    max_tokens, pause = STEPS[request.param]
    specdec = {"method": PLUGIN, "proposer_config": {"file": str(file)}, "retry_after_steps": pause, "hang_seconds": 2}
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if request.param == "V1" else with_interpreted_triton(folder)
    return started("Configured", specdec, **runner), file, max_tokens


@pytest.fixture
def faulty(openai, server):
    faulty = Faulty(openai, *server)
    faulty.works()
    yield faulty
    faulty.works()


@pytest.mark.parametrize(("fault", "code"), [("raises", "SD-E210"), ("nonsense", "SD-E203")])
def test_a_proposer_that_fails_is_switched_off_in_sight_of_everybody_and_comes_back(faulty, fault, code):
    server, plain = faulty.server, faulty.text(**PLAIN)
    errors = server.metric(ERRORS, code=code) or 0
    retries = server.metric("specdec:proposer_retries_total")
    faulty.has(fault)
    assert faulty.text() == plain
    server.until_metric(ENABLED, lambda value: value == 0)
    server.until_metric(ERRORS, lambda value: value > errors, code=code)
    assert server.get("/health") is not None
    for said in (code, PLUGIN, "served_proposers.py", "disabled after"):
        server.until_logged(said)
    faulty.works()
    assert server.metric("specdec:proposer_retries_total") > retries
    assert "SD-W217" in server.log
    assert faulty.text() == plain


def test_a_call_that_hangs_is_named_with_its_line_and_shown_and_everybody_is_served_afterwards(faulty):
    server, plain = faulty.server, faulty.text(**PLAIN)
    told = server.log.count("SD-W216")
    faulty.has("hangs")
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(faulty.text) for _ in range(3)]
        until(lambda: server.log.count("SD-W216") > told, "the hang is told", server.alive)
        server.until_metric(CALL_SECONDS, lambda value: value > 1)
        assert server.get("/health") is not None
        assert not any(answer.done() for answer in answers)
        said = server.log.rpartition("SD-W216")[2]
        assert f"[{PLUGIN}]" in said.partition("\n")[0]
        assert "in wait_for_somebody" in said.partition("stack")[0]
        faulty.has("")
        assert [answer.result(timeout=300) for answer in answers] == [plain] * 3
    server.until_metric(CALL_SECONDS, lambda value: value < 1)
    assert server.metric(ENABLED) == 1


def test_options_of_the_proposer_come_over_http_beside_ours_or_within(faulty):
    told = {"vllm_xargs": {"specdec": '{"least": 1000}'}}
    assert faulty.text(extra_body=told) == faulty.text(**PLAIN)
    with pytest.raises(Exception, match="did you mean 'least'"):
        faulty.text(extra_body={"vllm_xargs": {"specdec": '{"leest": 1}'}})
