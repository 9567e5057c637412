"""A hook plugin that is installed beside vLLM is shown in its V2 runner what was verified."""

from __future__ import annotations

import pytest
from listener import shown
from vllm_process import LISTENING, VllmProcess, write_distribution

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def listening(shim, tmp_path_factory):
    """A process with a plugin of whoever listens."""
    site = tmp_path_factory.mktemp("listening")
    write_distribution(site, "listening", LISTENING)
    process = VllmProcess(site / "log", **shim | {"path": [*shim["path"], str(site)]})
    yield process
    process.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_listeners_are_shown_the_logits_that_chose_each_token(
    listening, describe, plain, record, tmp_path, asynchronous
):
    """Asynchronous scheduling has rows for slots that are filled up. Prompts come in chunks, which sample nothing."""
    run = listening.run(describe("ngram", async_scheduling=asynchronous, max_num_batched_tokens=48), tmp_path)
    assert run["error"] is None
    assert run["outputs"] == [plain]
    texts, num_accepted = shown(run["verified"])
    assert texts == sorted(text for (text,) in plain)
    assert num_accepted == run["reports"][0]["num_accepted_draft_tokens"] > 20
    record(run, "listeners are shown what was verified")
