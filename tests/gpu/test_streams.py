"""Streams of a device: engines on any of them, and the kit's check of proposers."""

from __future__ import annotations

import pytest
import stream_proposers
import torch
from gpu_helpers import DRAFTERS, TINY, engine, generate, speculation

from specdec.testing import check_proposer


def test_an_engine_works_on_the_stream_of_its_caller():
    expected = generate(engine(speculative_config=speculation("eagle3")))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert generate(engine(speculative_config=speculation("eagle3"))) == expected


@pytest.mark.parametrize(("name", "status"), [
    ("OnTheCurrent", "passed"), ("BothWait", "passed"), ("ReadsEarly", "failed"), ("ReturnsEarly", "failed"),
])  # fmt: skip
def test_the_check_finds_work_that_is_not_ordered(name, status):
    (result,) = check_proposer(getattr(stream_proposers, name), only=["streams"])
    assert result.status == status, result


@pytest.mark.parametrize("name", DRAFTERS)
def test_packaged_drafters_pass_it(name):
    (result,) = check_proposer(DRAFTERS[name], {"model": str(TINY / name)}, only=["streams"])
    assert result.status == "passed", result
