"""The conformance kit finds nothing in any packaged drafter."""

from __future__ import annotations

import pytest
from packaged_drafters import DRAFTERS

from specdec.testing import check_proposer

PATIENCE_S = 1800
"""A check fails after five minutes by itself, which one with many stages takes on a busy machine."""


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_check_passes_or_does_not_apply(name, target, tmp_path):
    asked = DRAFTERS[name](tmp_path, target)
    results = check_proposer(asked.method, asked.settings, target=asked.target, level="full", timeout=PATIENCE_S)
    assert [each.text for each in results if not each.ok] == []
    assert sum(each.status == "passed" for each in results) > 15
