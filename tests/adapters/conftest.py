"""The tiny target as transformers runs it, prompts for it, and a record of what tests showed of which engine."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from scripts.engine_table import CAPABILITIES
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec

sys.path.insert(0, str(Path(__file__).parent))  # classes are named by their path

TINY = (Path(specdec.__file__).parent / "assets" / "tiny").resolve()
RECORD = "SPECDEC_RECORD_ENGINES"  # the file that .ci/engines has written


def pytest_collection_modifyitems(items):
    """Tests marked `full` in the folders of vLLM's runners need vLLM."""
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.path.parent.name.startswith("vllm_") and item.get_closest_marker("full"):
            item.add_marker(
                pytest.mark.skip(reason="vLLM is not installed here; .ci/engines installs it and runs this")
            )


@pytest.fixture(scope="session")
def vllm_target(tmp_path_factory):
    """The tiny target without the extra file of its MTP layer, which vLLM takes for weights of the target."""
    directory = tmp_path_factory.mktemp("target")
    for file in (TINY / "target").iterdir():
        if file.name != "mtp.safetensors":
            (directory / file.name).symlink_to(file)
    return directory


@pytest.fixture(scope="session")
def tiny_drafter():
    """The directory of a shipped draft checkpoint, by method."""
    return lambda method: str(TINY / {"draft_model": "draft"}.get(method, method))


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="session")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def batch(tokenizer):
    """Eight of the shipped prompts as token ids, lengths mixed."""
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    return [tokenizer(row["prompt"])["input_ids"] for row in rows[:8]]


@pytest.fixture(scope="session")
def prompts(batch):
    """Two of them, [1, T] each."""
    return [torch.tensor([ids]) for ids in batch[:6:3]]


@pytest.fixture
def shown(request):
    """Note that this test showed capabilities of an engine, or in `refused` why it has them not.

    `workers`: process id and calls of `propose` of each. Printed always, kept where `.ci/engines` asks for it.
    """

    def note(engine, *capabilities, workers=(), refused=None):
        assert set(capabilities) <= set(CAPABILITIES)
        for pid, calls in workers:
            print(f"{engine}: worker pid {pid}: {calls} calls of propose")
        if RECORD not in os.environ:
            return
        entry = {"test": request.node.nodeid, "propose_calls": [calls for _, calls in workers], "refused": refused}
        lines = [json.dumps({"engine": engine, "capability": each, **entry}) + "\n" for each in capabilities]
        with Path(os.environ[RECORD]).open("a") as file:  # by whole lines: other processes write there too
            file.write("".join(lines))

    return note


@pytest.fixture(scope="session")
def two_token_distribution(model):
    """The probability of every pair of tokens after a prompt, each among the `top_k` most likely."""

    def following(ids, top_k):
        with torch.inference_mode():
            best = model(torch.tensor([ids])).logits[0, -1].topk(top_k)
        return dict(zip(best.indices.tolist(), best.values.softmax(dim=-1).tolist(), strict=True))

    def distribution(prompt, top_k):
        firsts = following(prompt, top_k)
        return {(a, b): p * q for a, p in firsts.items() for b, q in following([*prompt, a], top_k).items()}

    return distribution
