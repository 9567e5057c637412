"""Runs of vLLM's V2 model runner on any machine, in one process; Triton's interpreter runs its kernels."""

from __future__ import annotations

from functools import partial

import pytest
from vllm_process import VllmProcess, job_of, with_interpreted_triton

BLOCK_SIZE = 32  # vLLM's attention on a CPU takes no smaller blocks


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """What a process has that runs V2."""
    return with_interpreted_triton(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def process(shim):
    """Starts such a process."""
    return partial(VllmProcess, **shim)


@pytest.fixture(scope="session")
def kept(process, tmp_path_factory):
    """The process that runs one engine after the other."""
    kept = process(tmp_path_factory.mktemp("vllm") / "log")
    yield kept
    kept.close()


@pytest.fixture(scope="session")
def describe(vllm_target, batch):
    """As `job_of`, with what V2 asks for on a CPU."""
    settings = {"block_size": BLOCK_SIZE, "async_scheduling": False}
    return lambda *args, **kwargs: job_of(vllm_target, batch, *args, **settings | kwargs)


@pytest.fixture(scope="session")
def run_engine(kept, process, describe, tmp_path_factory):
    """Start vLLM, generate, and return what came out: see run_vllm.py. Several workers have a process of their own."""

    def run(*args, **kwargs):
        directory = tmp_path_factory.mktemp("run")
        job = describe(*args, **kwargs)
        if job["engine"].get("distributed_executor_backend") == "uni":
            return kept.run(job, directory)
        alone = process(directory / "log", in_process=False)
        try:
            return alone.run(job, directory)
        finally:
            alone.close()

    return run


@pytest.fixture(scope="session")
def plain(run_engine):
    """What vLLM generates greedily without speculation, of the same eight prompts."""
    run = run_engine()
    assert run["error"] is None, run["log"][-4000:]
    assert run["v2"]
    return run["outputs"][0]


@pytest.fixture
def record(shown):
    """Note what a run showed."""

    def note(outcome, *capabilities, refused=None):
        workers = [(report["pid"], report["propose_calls"]) for report in outcome["reports"]]
        version = outcome["version"].partition("+")[0]
        shown(f"vLLM {version}, V2, CPU", *capabilities, workers=workers, refused=refused)

    return note
