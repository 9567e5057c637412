"""The remote proposer in the engine: the drafts and text of one process, and equal text whatever the drafter does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import zmq
from drafter_servers import hosted_with, serving
from inside import proposer_of

from specdec import LLM, SamplingParams
from specdec.plugins.remote.texts import Text
from specdec.sdk import ConfigError, Draft, ProposerError
from specdec.sdk.wire import Ask, Drafted, Drafts, Failed, Hello, Refused, Returned, Welcome, at_server, encode

PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def push(self, x):\n", "import os\nimport sys\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=48)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
DRAFT_MODEL = {"model": "tiny/draft", "num_speculative_tokens": 4}


def engine(config=None, **settings) -> LLM:
    return LLM("tiny", speculative_config=config, **settings)


def remote(address, **options):
    return {"method": "remote", "num_speculative_tokens": 4, "proposer_config": {"address": address, **options}}


def texts(llm, prompts=PROMPTS, params=GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def lengths(llm, prompts=PROMPTS) -> list[float]:
    outputs = llm.generate(prompts, GREEDY)
    return [output.outputs[0].spec_decode_metrics["mean_acceptance_length"] for output in outputs]


def figures(llm) -> dict[str, float]:
    return {m.name.removeprefix("specdec:proposer_remote_"): m.value for m in llm.get_metrics() if "_remote_" in m.name}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts(engine())


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/socket"


@pytest.mark.parametrize(
    "config",
    [
        NGRAM,
        {"method": "suffix", "num_speculative_tokens": 4},
        DRAFT_MODEL,
        {"method": "ngram", "num_speculative_tokens": 4, "max_nodes": 8},
    ],
    ids=["ngram", "suffix", "draft_model", "tree"],
)
def test_text_is_that_of_plain_decoding_and_drafts_are_accepted(config, address, plain) -> None:
    with serving(hosted_with(config), address):
        llm = engine(remote(address))
        assert texts(llm) == plain
        assert figures(llm)["in_time"] > 0
        assert min(lengths(llm)) > 1.5
        llm.close()


@pytest.mark.parametrize(
    "config", [NGRAM, {"model": "tiny/draft", "num_speculative_tokens": 4}], ids=["ngram", "model"]
)
def test_drafts_are_those_of_one_process(config, address) -> None:
    with serving(hosted_with(config), address):
        llm = engine(remote(address))
        assert lengths(llm) == lengths(engine(config))
        llm.close()


def test_preempted_requests_keep_their_text_and_two_engines_share_a_drafter(address, plain) -> None:
    few = {"max_num_seqs": 3, "num_kv_blocks": 12, "block_size": 16, "max_model_len": 128}
    with serving(hosted_with(NGRAM), address):
        one, two = engine(remote(address), **few), engine(remote(address))
        assert texts(one) == texts(two) == plain
        one.close()
        assert texts(two) == plain
        two.close()


def test_a_server_that_is_restarted_gets_the_texts_anew(address, plain) -> None:
    with serving(hosted_with(NGRAM), address):
        llm = engine(remote(address, deadline_ms=2000))
        stream = llm.stream(PROMPTS, GREEDY)
        found: dict[str, list[int]] = {}
        update = next(stream)
        found.setdefault(update.request_id, []).extend(update.token_ids)
    drafter = proposer_of(llm)._conversation._drafter
    with serving(hosted_with(NGRAM), address):
        for update in stream:
            found.setdefault(update.request_id, []).extend(update.token_ids)
        assert [found[name] for name in sorted(found, key=int)] == plain
        until(lambda: drafter.is_up)
        before = figures(llm)["asked"]
        assert texts(llm) == plain
        assert figures(llm)["asked"] > before
        assert figures(llm)["outages"] >= 1
        llm.close()


def until(condition) -> None:
    """The drafter's pauses are real seconds; the test waits for it, whatever they are."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come back")


@contextmanager
def stub(address, answers, num_uniforms=0):
    """A server that says whatever it likes: `answers` gives bytes for each question."""
    context, ended = zmq.Context(), threading.Event()

    def run() -> None:
        with context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(address)
            while not ended.is_set():
                if socket.poll(20):
                    client, data = socket.recv_multipart()
                    said = at_server(data)
                    welcome = [encode(Welcome(1, "stub", 4, num_uniforms))] if isinstance(said, Hello) else []
                    for answer in answers(said) if isinstance(said, Ask) else welcome:
                        socket.send_multipart([client, answer])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        context.term()


def wrong(ask):
    return encode(
        Drafts(ask.number, [Drafted(row.request_id, row.start + len(row.tokens), [9, 9, 9]) for row in ask.rows])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        lambda ask: [b"nonsense"],
        lambda ask: [encode(Drafts(ask.number + 5, []))],
        lambda ask: [encode(Drafts(ask.number, [Drafted(row.request_id, 1, [10**6]) for row in ask.rows]))],
        lambda ask: [encode(Drafts(ask.number, [Drafted("nobody", 1, [1])] * 100))],
        lambda ask: [encode(Drafts(ask.number, [Drafted(r.request_id, 10**9, [1] * 4000) for r in ask.rows]))],
        lambda ask: [b"x" * (5 * 2**20)],
        lambda ask: [],
        lambda ask: [wrong(ask)],
        lambda ask: [wrong(ask)] * 3,
        lambda ask: [encode(Refused("SD-E332", "no", {"reason": "so", "self": "it", "because": "of that"}))],
        lambda ask: [encode(Welcome(1, "again", 4))] * 50,
        lambda ask: [encode(Returned(ask.number, {"x": 1.0, "no name": float("nan")}))] * 50,
        lambda ask: [*[encode(Failed(0, "SD-E210", "it raised"))] * 50, wrong(ask)],
        lambda ask: [encode(Failed(ask.number, "SD-E110", "it raised", {"self": "it"}, kind="PluginLoadError"))],
        lambda ask: [encode(Failed(ask.number, "SD-E110", "it raised", {"reason": "so"}, kind="Refusal"))],
    ],
    ids=[
        *("bytes", "number", "token", "names", "lengths", "enormous", "silent", "wrong", "thrice"),
        *("refuses", "welcomes", "returns", "fails", "fails to load", "refuses it"),
    ],
)
def test_a_hostile_server_costs_drafts_alone(answer, address, plain) -> None:
    with stub(address, answer):
        llm = engine(remote(address, hang_seconds=0.1) | {"on_proposer_error": "skip_step"})
        assert texts(llm) == plain
        shown = figures(llm)
        assert shown["asked"] >= shown["in_time"] + shown["late"]
        assert shown["outages"] - 1 <= shown["returns"] <= shown["outages"]
        llm.close()


@pytest.mark.slow
def test_a_server_that_never_stops_talking_keeps_no_step_beyond_its_deadline(address, plain) -> None:
    """For seconds, its answers follow each other faster than the engine reads them."""

    def answer(ask):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            yield encode(Returned(0))

    with stub(address, answer):
        llm = engine(remote(address, deadline_ms=20, hang_seconds=20))
        conversation, waits = proposer_of(llm)._conversation, [0.0]
        llm.engine.add_request(PROMPTS[0], GREEDY, "a")
        request = llm.engine._requests["a"]
        while llm.engine.step():
            waits.append(conversation._waited)
        assert list(request.token_ids[len(request.prompt_token_ids) :]) == plain[0]
        assert max(later - sooner for sooner, later in pairwise(waits)) < 1.5
        llm.close()


@pytest.mark.slow
def test_text_is_equal_whenever_answers_come(address) -> None:
    """The stub knows the text and answers at once, and no step waits for it: answers come when they come."""
    prompt = PROMPTS[0]
    [text] = texts(engine(), [prompt])
    written: list[int] = []

    def answer(ask):
        [row] = ask.rows
        written.extend(row.tokens)
        following = text[len(written) : len(written) + 4]
        if ask.number % 4 == 0:
            following = [9] * 4
        return [encode(Drafts(ask.number, [Drafted(row.request_id, row.start + len(row.tokens), following)]))]

    with stub(address, answer):
        llm = engine(remote(address, deadline_ms=0.001))
        assert texts(llm, [prompt]) == [text]
        shown = figures(llm)
        assert shown["asked"] - 1 <= shown["late"] + shown["in_time"] <= shown["asked"]
        llm.close()


@pytest.mark.parametrize(
    ("rest", "committed", "left", "counted"),
    [
        ([5, 6, 7], [5], [6, 7], {"rebased": 1}),
        ([5, 6, 7], [5, 6, 7], [], {"dropped": 1}),
        ([5, 6, 7], [8], [], {"dropped": 1}),
        ([], [8], [], {}),
        ([5, 6, 7], [], [5, 6, 7], {}),
    ],
)
def test_what_is_left_of_an_answer_continues_the_text(rest, committed, left, counted) -> None:
    text, counts = Text(rest=rest, length=10), Counter()
    assert text.drafts(committed, 10 + len(committed), counts) == left
    assert dict(counts) == counted


class Fails:
    """Raises in its third step."""

    def __init__(self, config) -> None:
        self.steps = 0

    def propose(self, step):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("in the other process")
        return Draft(torch.zeros(len(step), step.width, dtype=torch.int64), torch.zeros(len(step), dtype=torch.int64))


def test_an_error_there_is_raised_here_with_its_line(address) -> None:
    with serving(hosted_with({"method": f"{__name__}:Fails", "num_speculative_tokens": 4}), address):
        llm = engine(remote(address))
        with pytest.raises(ProposerError, match="in the other process") as raised:
            texts(llm)
        assert raised.value.code == "SD-E210"
        assert "test_remote.py" in str(raised.value.facts["where"])
        llm.close()


def test_such_an_error_follows_the_policy_of_the_engine(address, plain) -> None:
    with serving(hosted_with({"method": f"{__name__}:Fails", "num_speculative_tokens": 4}), address):
        llm = engine(remote(address) | {"on_proposer_error": "skip_step"})
        assert texts(llm) == plain
        assert figures(llm)["errors"] == 1
        llm.close()


def test_a_wrong_address_is_said_at_the_start(address) -> None:
    with pytest.raises(Exception, match="SD-E334"):
        engine(remote(address, start_seconds=0.05))


def test_a_wait_without_end_is_refused(address) -> None:
    with pytest.raises(ConfigError, match="start_seconds"):
        engine(remote(address, start_seconds=float("inf")))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="SD-E333"):
        engine(remote("tcp://10.0.0.1:5570"))


def test_sampled_text_is_that_of_one_hot_drafts(address) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    with serving(hosted_with(NGRAM), address):
        llm = engine(remote(address))
        assert texts(llm, params=params) == texts(engine(NGRAM), params=params)
        llm.close()


@pytest.mark.full
def test_nobody_else_imports_the_libraries() -> None:
    code = (
        "import sys; from specdec import LLM; LLM('tiny', speculative_config="
        "{'method': 'ngram', 'num_speculative_tokens': 2}); print({'zmq', 'msgspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "set()"


@pytest.mark.full
def test_missing_libraries_are_asked_for_by_name() -> None:
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'zmq' else real(name, *a)\n"
        "from specdec import LLM\n"
        "LLM('tiny', speculative_config={'method': 'remote', 'num_speculative_tokens': 2,"
        " 'proposer_config': {'address': 'ipc:///tmp/none'}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pyzmq is not installed" in done.stderr
    assert 'pip install "specdec-sdk[remote]"' in done.stderr


@pytest.mark.slow
def test_the_command_serves_until_sigterm_and_saves_its_state(tmp_path, plain) -> None:
    config = {"num_speculative_tokens": 4, "state_dir": str(tmp_path / "state")}
    command = [sys.executable, "-m", "specdec", "serve-proposer", "suffix", "--target", "tiny"]
    command += ["--listen", "tcp://127.0.0.1:*", "-sc", json.dumps(config)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert child.stdout is not None
    address = child.stdout.readline().rpartition(" at ")[2].strip()
    llm = engine(remote(address))
    assert texts(llm) == plain
    llm.close()
    child.send_signal(signal.SIGTERM)
    with child:
        assert child.wait(30) == 0
    assert any((tmp_path / "state").iterdir())
