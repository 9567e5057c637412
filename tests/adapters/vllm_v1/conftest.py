"""Runs of the real engine, one process each."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

HERE = Path(__file__).parent
PROPOSERS = HERE.parent  # named by class path

TINY = (Path(specdec.__file__).parent / "assets" / "tiny").resolve()
TIME_LIMIT = 400  # seconds of one run; a start takes some 15 on an idle machine
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0}
IN_PROCESS = {"distributed_executor_backend": "uni"}  # the run's process is the worker


def pytest_collection_modifyitems(items):
    """Tests marked `full` in this folder need vLLM."""
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("full"):
            item.add_marker(
                pytest.mark.skip(reason="vLLM is not installed here; .ci/engines installs it and runs this")
            )


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """The tiny target without the extra file of its MTP layer, which vLLM takes for weights of the target."""
    directory = tmp_path_factory.mktemp("target")
    for file in (TINY / "target").iterdir():
        if file.name != "mtp.safetensors":
            (directory / file.name).symlink_to(file)
    return directory


@pytest.fixture(scope="session")
def prompts(batch):
    """Eight, as token ids."""
    return batch


@pytest.fixture(scope="session")
def run_engine(target, tmp_path_factory, prompts):
    """Start vLLM, generate, and return what came out: see run_engine.py."""

    def run(proposer=None, *, k=4, specdec=None, batches=None, sampling=None, speculative=None, **engine):
        directory = tmp_path_factory.mktemp("run")
        settings = ENGINE | (IN_PROCESS if "tensor_parallel_size" not in engine else {}) | engine
        if proposer is not None:
            named = {"model": f"specdec.adapters.vllm.{proposer}", "num_speculative_tokens": k}
            settings["speculative_config"] = named | (speculative or {})
            settings["additional_config"] = {"specdec": specdec or {}}
        job = {
            "engine": {"model": str(target), "disable_log_stats": True} | settings,
            "batches": batches or [prompts],
            "sampling": {"temperature": 0, "max_tokens": 48} | (sampling or {}),
        }
        (directory / "job.json").write_text(json.dumps(job))
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(PROPOSERS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if settings.get("distributed_executor_backend") == "uni" else "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function of the tests asks the workers for their reports
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        done = subprocess.run(
            [sys.executable, HERE / "run_engine.py", directory],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        result = directory / "result.json"
        assert result.is_file(), done.stderr[-4000:]
        return json.loads(result.read_text()) | {"log": done.stdout + done.stderr}

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
        shown(f"vLLM {version}, CPU", *capabilities, workers=workers, refused=refused)

    return note


@pytest.fixture(scope="session")
def tiny_drafter():
    """The directory of a shipped draft checkpoint, by method."""
    return lambda method: str(TINY / {"draft_model": "draft"}.get(method, method))
