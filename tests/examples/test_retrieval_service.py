"""The retrieval service with 20 ms of latency: the text is that of plain decoding, and late answers are of use."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread

import pytest

from specdec import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def push(self, x):\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
K = 8


@pytest.fixture
def url(monkeypatch, plain):
    """Of a service whose corpus is what the target wrote before."""
    for folder in ("retrieval-service", "specdec-plugin-retrieval/src"):
        monkeypatch.syspath_prepend(EXAMPLES / folder)
    from service import DEPTH, CorpusIndex, serve

    documents = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in plain]
    server = serve(CorpusIndex.build(documents, DEPTH), port=0, latency_ms=20)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
    for name in ("service", "retrieval_client"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def plain():
    return LLM("tiny").generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("deadline_ms", [0, None])
def test_late_answers_are_rebased_and_the_text_is_equal(url, plain, deadline_ms) -> None:
    config = {"model": "retrieval_client.RetrievalService", "num_speculative_tokens": K}
    config["proposer_config"] = {"url": url, "deadline_ms": deadline_ms}
    with LLM("tiny", speculative_config=config) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        figures = {
            metric.name.rpartition("retrievalservice_")[2]: metric.value
            for metric in llm.get_metrics()
            if "retrievalservice_" in metric.name
        }
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].spec_decode_metrics["num_accepted_draft_tokens"] for each in outputs) > 16
    assert figures["errors"] == 0
    assert (figures["rebased"] > 0) == (deadline_ms == 0)
