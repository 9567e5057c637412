"""Tests on CUDA devices that are not there (tests/helpers/emulated_cuda). They need g++ and a PyTorch without CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from emulated_cuda import can_be_had, emulated_cuda, plain_kernels

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # helpers of this folder are imported by name


def pytest_collection_modifyitems(items):
    if not can_be_had():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no g++, or a PyTorch that has devices of its own"))


@pytest.fixture
def cuda():
    """Two devices, on which engines run."""
    with emulated_cuda(num_devices=2) as devices, plain_kernels(devices):
        yield devices


@pytest.fixture(scope="session")
def mtp_target(tmp_path_factory):
    """See `serving.make_mtp_target`."""
    from serving import make_mtp_target  # found here once this folder is on the path

    return make_mtp_target(tmp_path_factory.mktemp("mtp"))
