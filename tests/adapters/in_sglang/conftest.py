"""A real SGLang on a CPU, in processes of its own, with its kernels for CPUs in PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
from importlib import metadata
from pathlib import Path

import pytest
from sglang_process import in_process
from vllm_process import write_distribution

HERE = Path(__file__).parent
MEDIA = os.environ.get("SPECDEC_TORCHVISION")  # a folder with the Python part of torchvision and torchaudio
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": 512,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "mem_fraction_static": 0.1,
    "log_level": "warning",
}


def pytest_collection_modifyitems(items):
    if MEDIA is None or importlib.util.find_spec("sglang") is None:
        reason = "SGLang is not installed here; .ci/sglang installs it and runs this"
        for item in items:
            if item.path.parent == HERE and item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def sglang_environment(tmp_path_factory):
    """Of a process that runs SGLang on a CPU: what it has no wheels for stands in `kernels`."""
    site = tmp_path_factory.mktemp("site")
    write_distribution(site, "cpu_attention", {"sglang.srt.plugins": "cpu_attention = cpu_attention:install"})
    path = [site, HERE.parent, HERE / "kernels", MEDIA, HERE.parent / "vllm_shared" / "torchvision_operators"]
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@pytest.fixture(scope="session")
def sglang(sglang_environment, vllm_target, prompts_of_text, tmp_path_factory):
    """Runs one engine over the prompts. `config`: of a proposer; None: plain SGLang."""

    def run(config=None, *, k=4, max_new_tokens=48, leaves=False, **environment):
        folder = tmp_path_factory.mktemp("run")
        engine = ENGINE | {"model_path": str(vllm_target)}
        if config is not None:
            engine |= {"speculative_algorithm": "SPECDEC", "speculative_num_draft_tokens": k + 1}
            environment["SPECDEC_SGLANG"] = json.dumps(config)
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        job = {"engine": engine, "prompts": prompts_of_text, "sampling": sampling, "leaves": leaves}
        result = folder / "result.json"
        log = in_process([HERE.parent / "run_sglang.py", result], json.dumps(job), sglang_environment | environment)
        assert result.is_file(), log
        return json.loads(result.read_text()) | {"log": log}

    return run


@pytest.fixture(scope="session")
def prompts_of_text():
    return [
        "def main(",
        "class Stack:\n    def __init__(self",
        "import os\n",
        "for i in range(",
        "def read_lines(path):\n",
        "class Queue:\n    def push(self, item):\n",
    ]


@pytest.fixture(scope="session")
def plain(sglang):
    return sglang()


@pytest.fixture
def record(shown):
    """Note what a run showed, or why SGLang did not start."""

    def note(*capabilities, run=None, refused=None):
        workers = [] if run is None else [("of the scheduler", run["report"]["propose_calls"])]
        shown(f"SGLang {metadata.version('sglang')}, CPU", *capabilities, workers=workers, refused=refused)

    return note
