"""A process that runs vLLM engines for tests, one after the other: starting vLLM takes longer than most of them run."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent  # with the proposers that tests name by class path
TIME_LIMIT = 1200  # seconds of one run; a first start takes some 15 on an idle machine
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "seed": 0,
    "disable_log_stats": True,
}
LISTENING = {"specdec.plugins": "listener = listener:Listener"}  # the entry point of a hook plugin
IN_PROCESS = {"distributed_executor_backend": "uni"}  # the run's process is the worker


def job_of(target, prompts, proposer=None, *, k=4, specdec=None, batches=None, sampling=None, stepwise=False, **engine):
    """What to run. `sampling`: of all prompts, or a list with that of each prompt of the only batch.

    Of `engine`: begins_with: what workers do first (`BEGINNINGS` of run_vllm.py). cuts_refused: vLLM cuts drafts that a
    grammar refuses. awaits_drafter: no batch begins before the drafter, in another process, can be asked.
    """
    speculative, lora = engine.pop("speculative", {}), engine.pop("lora", None)
    begins_with, cuts_refused = engine.pop("begins_with", None), engine.pop("cuts_refused", False)
    awaits_drafter = engine.pop("awaits_drafter", False)
    settings = ENGINE | (IN_PROCESS if "tensor_parallel_size" not in engine else {}) | engine
    if proposer is not None:
        named = {"model": f"specdec.adapters.vllm.{proposer}", "num_speculative_tokens": k}
        settings["speculative_config"] = named | speculative
        settings["additional_config"] = {"specdec": specdec or {}}
    if lora is not None:
        settings |= {"enable_lora": True, "max_lora_rank": 8}
    batches = batches or [prompts]
    given = [sampling] if isinstance(sampling, list) else [[sampling] * len(batch) for batch in batches]
    return {
        "engine": {"model": str(target)} | settings,
        "batches": batches,
        "stepwise": stepwise,
        "begins_with": begins_with,
        "cuts_refused": cuts_refused,
        "awaits_drafter": awaits_drafter,
        **({} if lora is None else {"lora": str(lora)}),
        "sampling": [[{"temperature": 0, "max_tokens": 48} | (one or {}) for one in batch] for batch in given],
    }


def write_distribution(site, name, groups):
    """For a process whose `path` has the folder: one with an entry point in each group."""
    metadata = site / f"{name}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(f"[{group}]\n{line}" for group, line in groups.items()))


def environment_of(in_process, path, more):
    """Of a process that runs vLLM offline on a CPU. `path`: folders of modules and distributions, first."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function of the tests asks the workers for their reports
        "VLLM_LOGGING_LEVEL": "WARNING",
        **more,
    }


def with_interpreted_triton(folder):
    """What a process has in which Triton's interpreter is an active backend, so that vLLM chooses V2 by itself.

    The shim is a distribution in the folder: Triton and vLLM look for entry points in every process.
    """
    shim = HERE / "vllm_v2" / "interpreted_triton"
    (folder / shim.name).symlink_to(shim)
    metadata = folder / f"{shim.name}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {shim.name}\nVersion: 0\n")
    groups = {"triton.backends": f"cpu = {shim.name}", "vllm.general_plugins": f"shim = {shim.name}.repairs:install"}
    (metadata / "entry_points.txt").write_text("\n".join(f"[{group}]\n{line}" for group, line in groups.items()))
    return {"path": [str(folder)], "TRITON_INTERPRET": "1"}


class VllmProcess:
    """`in_process`: whether the engine and its one worker run in this process, so that several can follow each other.

    `path`: see `environment_of`.
    """

    def __init__(self, log, *, in_process=True, path=(), **environment):
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "run_vllm.py"],
                env=environment_of(in_process, path, environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def run(self, job, directory):
        """The result of one job, with what was printed meanwhile as `log`."""
        printed = self._log.stat().st_size
        (directory / "job.json").write_text(json.dumps(job))
        self._process.stdin.write(f"{directory}\n")
        self._process.stdin.flush()
        select.select([self._process.stdout], [], [], TIME_LIMIT)
        log = self._log.read_text(errors="replace")[printed:]
        result = directory / "result.json"
        assert result.is_file(), log[-4000:]
        self._process.stdout.readline()
        return json.loads(result.read_text()) | {"log": log}

    def close(self):
        self._process.kill()
        self._process.communicate()
