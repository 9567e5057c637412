"""The five proposers of examples/five: their length, their text, what is accepted of them, and the contract."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import threading
import tokenize
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specdec import LLM, SamplingParams
from specdec.testing import check_proposer

FOLDER = Path(__file__).parents[2] / "examples" / "five"
MOST_LINES = {
    "prompt_lookup": 27,
    "medusa_heads": 23,
    "eagle3_head": 42,
    "remote_retrieval": 52,
    "diffusion_block": 54,
}  # those of the review that asked for contract 1.0
CLASSES = {
    "prompt_lookup": "PromptLookup",
    "medusa_heads": "MedusaHeads",
    "eagle3_head": "Eagle3Head",
    "remote_retrieval": "RemoteRetrieval",
    "diffusion_block": "DiffusionBlock",
}
NETWORKS = ("medusa_heads", "eagle3_head", "diffusion_block")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def __init__(self):\n"]


def code_lines(text):
    """Lines that are no import, docstring, comment or blank."""
    left_out = set()
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type not in LAYOUT} - left_out)


class LookUp(BaseHTTPRequestHandler):
    """A service that answers with what followed the newest two tokens before."""

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = question["token_ids"]
        places = [i for i in range(2, len(ids)) if ids[i - 2 : i] == ids[-2:]]
        answer = ids[places[-1] :][: question["k"]] if places else []
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"token_ids": answer}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module", autouse=True)
def importable():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), LookUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def settings(url, request):
    """Of `speculative_config`: the service waits for every answer, so that what it accepts can be counted."""
    if request.getfixturevalue("name") != "remote_retrieval":
        return {}
    return {"proposer_config": {"url": url, "deadline_ms": None}}


@pytest.mark.parametrize("name", MOST_LINES)
def test_it_is_no_longer_than_the_review_allows(name):
    found = code_lines((FOLDER / f"{name}.py").read_text())
    assert found <= MOST_LINES[name]
    [told] = re.findall(rf"\({name}\.py\).* (\d+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert int(told) == found


def generated(llm, **sampling):
    return [
        each.outputs[0] for each in llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True, **sampling))
    ]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("name", CLASSES)
def test_its_text_is_that_of_plain_decoding_in_fewer_steps(name, settings, temperature):
    sampling = {"temperature": temperature, "seed": 5}
    expected = generated(LLM("tiny"), **sampling)
    found = generated(
        LLM("tiny", speculative_config={"model": f"{name}.{CLASSES[name]}", "num_speculative_tokens": 3, **settings}),
        **sampling,
    )
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.spec_decode_metrics["num_accepted_draft_tokens"] for each in found) > 0


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in NETWORKS else ()) for each in CLASSES]
)
def test_it_keeps_the_contract(name, settings):
    found = check_proposer(f"{name}:{CLASSES[name]}", settings)
    assert [each.text for each in found if each.status not in ("passed", "skipped")] == []


@pytest.mark.parametrize(
    ("name", "packaged", "k"),
    [("medusa_heads", "medusa", 3), ("eagle3_head", "eagle3", 3), ("diffusion_block", "dflash", 7)],
)
def test_it_drafts_what_the_packaged_proposer_drafts(name, packaged, k):
    configs = [{"model": f"{name}.{CLASSES[name]}"}, {"model": f"tiny/{packaged}"}]
    counts = []
    for config in configs:
        found = generated(LLM("tiny", speculative_config={**config, "num_speculative_tokens": k}), temperature=0)
        counts.append([each.spec_decode_metrics["num_accepted_draft_tokens"] for each in found])
    assert counts[0] == counts[1]


def test_a_request_chooses_how_far_the_look_up_reaches():
    llm = LLM("tiny", speculative_config={"model": "prompt_lookup.PromptLookup", "num_speculative_tokens": 3})
    drafted = [
        sum(each.spec_decode_metrics["num_draft_tokens"] for each in generated(llm, temperature=0, extra_args=extra))
        for extra in ({"specdec": {"shortest": 1}}, {"specdec": {"shortest": 3}})
    ]
    assert drafted[0] > drafted[1]
