"""Every test: no network, one torch thread, interpreted kernels without a GPU, no proofs of targets, no slow draws."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # what tests of several folders share, imported by name
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, which modelling code does

torch.set_num_threads(1)

# A machine that is busy is slow, and no test may tell it apart from one that is not.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session", autouse=True)
def _proof():
    """Without a proof at each start, which is half the time that a tiny engine takes."""
    from specdec.core.model import target_proof

    for_users = target_proof.MOST_PARAMETERS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_proof, "MOST_PARAMETERS", 0)
        yield target_proof, for_users


@pytest.fixture
def proven_targets(_proof, monkeypatch):
    """Engines prove their targets, as they do for users, on pages, and in processes of their own."""
    module, for_users = _proof
    monkeypatch.setattr(module, "MOST_PARAMETERS", for_users)


@pytest.fixture
def half_by_default():
    """A user's script says so for its own tensors, and makes an engine too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """What was logged is sent to another process in UTF-8, which half a surrogate pair is not."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "replace").decode()) for name, text in report.sections]
    return report
