"""Which backend serves a device: the first that can be imported and whose kernels run here."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from specdec.cli._checks import check_gpu_kernels
from specdec.core.kernels import backend
from specdec.core.kernels.backend import BACKENDS, Backend, Unavailable, find_backend

NO_DEVICE = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a device kernels run")


@pytest.fixture
def cuda_is_said_to_be_there(monkeypatch):
    """Torch says so. What is launched fails, as this torch has no device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_device_nothing_is_launched():
    assert find_backend(BACKENDS["cuda"][0]).__name__ == "TritonBackend"
    assert list(check_gpu_kernels()) == []


@NO_DEVICE
def test_kernels_that_do_not_run_leave_the_rest_of_the_device(cuda_is_said_to_be_there, caplog):
    with caplog.at_level(logging.WARNING, "specdec"):
        found = backend.backend_of.__wrapped__("cuda")
    assert found.__name__ == "CudaBackend"
    assert "a kernel of Triton does not run: " in caplog.text
    with pytest.raises(Unavailable):
        find_backend(BACKENDS["cuda"][0])


@NO_DEVICE
def test_doctor_says_that_kernels_do_not_run(cuda_is_said_to_be_there):
    (finding,) = check_gpu_kernels()
    assert finding.status == "note"
    assert "does not run" in finding.found
    assert "gcc" in finding.fix


@pytest.mark.slow
def test_without_triton_the_rest_of_the_device_can_be_imported():
    code = f"import sys; sys.modules['triton'] = None; import {BACKENDS['cuda'][1].partition(':')[0]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_where_nothing_can_be_imported_pytorch_serves(monkeypatch, caplog):
    monkeypatch.setitem(BACKENDS, "cuda", ("specdec.core.kernels.no_such_room:Backend",))
    assert backend.backend_of.__wrapped__("cuda") is Backend
    assert "no_such_room" in caplog.text
