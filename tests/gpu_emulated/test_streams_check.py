"""The check of streams runs where a device is. Whether it finds a fault, tests/gpu shows: here nothing is late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.testing import check_proposer

FOLDER = str(Path(__file__).parents[1] / "gpu")


@pytest.mark.full
def test_right_proposers_pass_the_check_of_streams(cuda, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import stream_proposers

    naps = []
    monkeypatch.setattr(torch.cuda, "_sleep", naps.append)
    (result,) = check_proposer(stream_proposers.OnTheCurrent, only=["streams"])
    assert result.status == "passed", result.text
    assert len(naps) > 10, "its views came late"
    (result,) = check_proposer("ngram", only=["streams"])
    assert result.status == "skipped"
    assert "drafts on the host" in result.facts["reason"]
