"""A watch in a program of one's own: what it says of a call that does not end."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from specdec.sdk.errors import PluginId
from specdec.testing import Watch

PLUGIN = PluginId("mine", f"{__name__}:Mine", "dist-mine", "1.2")


@pytest.fixture
def told():
    """The first message of the engine's logger, once there is one."""
    seen, messages = threading.Event(), []

    class Listener(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            seen.set()

    listener = Listener()
    logging.getLogger("specdec").addHandler(listener)
    yield seen, messages
    logging.getLogger("specdec").removeHandler(listener)


def test_a_watch_names_plugin_method_and_line(told):
    seen, messages = told
    with Watch(seconds=0.01):
        sys.audit("specdec.call", PLUGIN, "propose")
        assert seen.wait(60)
        sys.audit("specdec.call_ended")
    assert messages[0].startswith("SD-W317 propose has not ended after 0.01 s   [dist-mine:mine 1.2]")
    where = messages[0].splitlines()[1]
    assert f"{__file__}:" in where
    assert where.endswith("in test_a_watch_names_plugin_method_and_line")


def test_the_import_of_a_plugin_is_a_call_of_it():
    from specdec.core.registry.importing import import_target
    from specdec.testing.calls import Calls

    calls, seen = Calls(), []
    calls.tell(lambda now, last: seen.append((last.doing, now is not None)))
    calls.listen()
    import_target(PluginId("mine", "json:JSONDecoder"))
    assert seen[:2] == [("importing the proposer", True), ("importing the proposer", False)]
    assert calls.here() is None
