"""The drafters that the first hour on a device measures, on one that is not there."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.gpu.drafting import METHODS, SMALL, TARGET
from benchmarks.gpu.figures import Figures
from benchmarks.gpu.run import Run
from figures import CHECKED_STEPS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A stage's run on a CPU, and the same one on a device. Checkpoints are made on the first."""
    folder = tmp_path_factory.mktemp("first_hour")

    def run(device):
        return Run(Figures(folder / "figures.json"), folder / "models", torch.device(device), math.inf, smoke=True)

    run("cpu").checkpoint(TARGET)
    return run("cpu"), run("cuda")


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_with_its_drafters_waits_once(name, sampling, runs, cuda):
    here, there = runs
    drafter = here.eagle3(TARGET) if name == "EAGLE-3" else here.checkpoint(SMALL)
    speculation = {"method": METHODS[name], "model": str(drafter), "num_speculative_tokens": 3}
    speculation["draft_sample_method"] = sampling
    params = there.params(TARGET, temperature=0.8 * (sampling == "probabilistic"), seed=3, max_tokens=100)
    with there.engine(TARGET, speculative_config=speculation, max_model_len=128) as llm:
        for each in there.prompts(TARGET, 2):
            llm.engine.add_request(each["prompt_token_ids"], params)
        for _ in range(CHECKED_STEPS):
            llm.engine.step()
        with cuda.counting() as counts:
            llm.engine.step()
        assert llm.engine.metrics.acceptance.num_draft_tokens
        assert not llm.engine.metrics.proposer_errors
    assert counts.waits.total() == 1, counts.waits
    assert counts.replays > 1
