"""Runs of the real engine, one process each."""

from __future__ import annotations

import pytest
from vllm_process import VllmProcess, job_of


@pytest.fixture(scope="session")
def prompts(batch):
    """Eight, as token ids."""
    return batch


@pytest.fixture(scope="session")
def run_engine(vllm_target, tmp_path_factory, prompts):
    """Start vLLM with its V1 runner, generate, and return what came out: see run_vllm.py."""

    def run(*args, **kwargs):
        directory = tmp_path_factory.mktemp("run")
        job = job_of(vllm_target, prompts, *args, **kwargs)
        alone = job["engine"].get("distributed_executor_backend") == "uni"
        process = VllmProcess(directory / "log", in_process=alone, VLLM_USE_V2_MODEL_RUNNER="0")
        try:
            return process.run(job, directory)
        finally:
            process.close()

    return run


@pytest.fixture(scope="session")
def plain(run_engine):
    """What vLLM generates greedily without speculation."""
    return run_engine()["outputs"][0]


@pytest.fixture
def record(shown):
    """Note what a run showed."""

    def note(outcome, *capabilities, refused=None):
        workers = [(report["pid"], report["propose_calls"]) for report in outcome["reports"]]
        version = outcome["version"].partition("+")[0]
        shown(f"vLLM {version}, V1, CPU", *capabilities, workers=workers, refused=refused)

    return note
