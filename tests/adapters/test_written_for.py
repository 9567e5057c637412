"""An engine that the adapter was not written for is refused, and one that nobody tried is warned of."""

from __future__ import annotations

import pytest

from specdec.adapters.written_for import check_engine
from specdec.sdk.errors import PluginLoadError

TRIED = ("0.31.0", "0.32.0")


@pytest.mark.parametrize(("found", "warned"), [("0.32.0", 0), ("0.31.0", 0), ("0.32.0+cpu", 0), ("0.33.0", 1)])
def test_a_version_that_nobody_tried_is_warned_of(found, warned, caplog):
    check_engine("vLLM", found, TRIED, [])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warned
    assert all("SD-W195" in each and f"vLLM {found}" in each for each in messages)


def test_what_differs_is_named_with_the_version_to_install():
    with pytest.raises(PluginLoadError, match="SD-E195") as raised:
        check_engine("vLLM", "0.32.0", TRIED, ["one thing", "another"])
    assert raised.value.facts["differs"] == "one thing\nanother"
    assert raised.value.facts["fix"].startswith("install vLLM 0.32.0,")
