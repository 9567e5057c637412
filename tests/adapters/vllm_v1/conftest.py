"""Runs of the real engine, one process each."""

from __future__ import annotations

import pytest
from vllm_process import VllmProcess, job_of


@pytest.fixture(scope="session")
def prompts(batch):
    """Eight, as token ids."""
    return batch


@pytest.fixture(scope="session")
def run_engine(run_job, vllm_target, prompts):
    """Start vLLM with its V1 runner, generate, and return what came out: see run_vllm.py."""
    return lambda *args, **kwargs: run_job(job_of(vllm_target, prompts, *args, **kwargs))


@pytest.fixture(scope="session")
def run_job(tmp_path_factory):
    """Run a job in a process of its own. `path`: see `environment_of`."""

    def run(job, path=()):
        directory = tmp_path_factory.mktemp("run")
        alone = job["engine"].get("distributed_executor_backend") == "uni"
        process = VllmProcess(directory / "log", in_process=alone, path=path, VLLM_USE_V2_MODEL_RUNNER="0")
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
