"""vLLM's engines run in this process, where faults are planted, in place of processes of their own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ADAPTERS = Path(__file__).parents[1] / "tests" / "adapters"
HERE = "SPECDEC_VLLM_HERE"  # set in a process that runs vLLM itself: how many folders were put into its path for that


def enter(runner: str) -> None:
    """Begin this process again as one that runs vLLM with this model runner, and let the tests run their jobs in it."""
    sys.path.insert(0, str(ADAPTERS))
    import vllm_process  # type: ignore[import-not-found]

    if HERE not in os.environ:
        settings = {"path": [], "VLLM_USE_V2_MODEL_RUNNER": "0"}
        if runner == "v2":
            settings = vllm_process.with_interpreted_triton(Path(tempfile.mkdtemp()))
        path = settings.pop("path")
        environment = vllm_process.environment_of(True, path, settings | {HERE: str(len(path))})
        os.execve(sys.executable, sys.orig_argv, environment)
    from vllm import LLM as LLM  # type: ignore[import-not-found]  # its import warns, which would be an error in a test

    vllm_process.VllmProcess = VllmHere


class VllmHere:
    """As `VllmProcess` of the tests, without a process and without a log."""

    def __init__(self, log: Path, *, in_process: bool = True, path: Any = (), **environment: str) -> None:
        import pytest

        if not in_process or len(path) > int(os.environ[HERE]):
            pytest.skip("it needs a process of its own")

    def run(self, job: dict[str, Any], directory: Path) -> dict[str, Any]:
        """The result of one job."""
        import run_vllm  # type: ignore[import-not-found]

        (directory / "job.json").write_text(json.dumps(job))
        run_vllm.answer(directory)
        return {**json.loads((directory / "result.json").read_text()), "log": ""}

    def close(self) -> None:
        """Nothing was begun."""
