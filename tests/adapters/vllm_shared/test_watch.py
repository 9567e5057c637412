"""A call that hangs is named with its line; it is shown; and the figures of workers reach the page of the server."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from specdec.adapters.prometheus import prometheus_text
from specdec.adapters.vllm_shared import watch as watching
from specdec.adapters.vllm_shared.watch import Watch
from specdec.adapters.vllm_shared.workers_page import VARIABLE, Workers, WorkersPage, registry_with
from specdec.core.request.metrics import Counter, Gauge
from specdec.sdk.errors import PluginId

PLUGIN = PluginId("slow", f"{__name__}:Slow", "my-dist", "1.2")


class Slow:
    """Waits for the test."""

    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def propose(self):
        self.inside.set()
        self.go_on.wait(60)


@pytest.fixture
def hanging():
    """A watch of a call that hangs in a thread of its own."""
    watch, slow = Watch(PLUGIN, limit=1e-6), Slow()

    def run():
        with watch.calling("propose"):
            slow.propose()

    thread = threading.Thread(target=run)
    thread.start()
    slow.inside.wait(60)
    yield watch, slow, thread
    slow.go_on.set()
    thread.join()


def test_the_line_where_a_call_hangs_is_named_with_its_plugin(hanging, caplog):
    watch, slow, thread = hanging
    watch.look()
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("SD-W216 propose has not returned for ")
    assert "[my-dist:slow 1.2]" in text
    line = Slow.propose.__code__.co_firstlineno + 2
    assert f"{__file__}:{line} in propose" in text.partition("stack")[0]
    assert watch.seconds > 0
    slow.go_on.set()
    thread.join()
    assert "propose of my-dist:slow 1.2 returned after" in caplog.records[-1].getMessage()
    assert watch.seconds == 0


def test_it_is_said_again_after_twice_the_time_and_not_before(caplog):
    watch, named = Watch(PLUGIN, limit=30), []
    with watch.calling("propose"):
        for seconds in (29, 31, 61, 63, 119, 127, 300, 310, 601):
            watch._call.start = time.monotonic() - seconds
            watch.look()
            if len(caplog.records) > len(named):
                named.append(seconds)
    assert named == [31, 63, 127, 300, 601]


def test_a_call_within_the_limit_is_not_named(caplog):
    watch = Watch(PLUGIN, limit=1e9)
    with watch.calling("observe"):
        assert watch.seconds >= 0
        watch.look()
    watch.look()
    assert not caplog.records


def test_the_thread_looks_until_it_is_stopped(monkeypatch):
    monkeypatch.setattr(watching, "PERIOD", 0.001)
    watch, looked = Watch(PLUGIN, limit=1e9), threading.Event()
    watch.each_time(looked.set)
    watch.start()
    assert looked.wait(60)
    watch.stop()


def test_what_is_under_way_ends_before_it_has_stopped(monkeypatch):
    monkeypatch.setattr(watching, "PERIOD", 0.001)
    watch, inside, ended = Watch(PLUGIN, limit=1e9), threading.Event(), threading.Event()

    def slow():
        inside.set()
        time.sleep(0.05)
        ended.set()

    watch.each_time(slow)
    watch.start()
    assert inside.wait(60)
    watch.stop()
    assert ended.is_set()


def page_of(directory):
    registry = CollectorRegistry()
    registry.register(Workers(directory))
    return generate_latest(registry).decode()


def test_the_figures_of_all_workers_stand_on_one_page_under_their_names(tmp_path):
    workers = [WorkersPage.of({VARIABLE: str(tmp_path)}) for _ in range(2)]
    for number, worker in enumerate(workers):
        labels = {"proposer": 'a "quoted" one'}
        figures = [Gauge("specdec:proposer_enabled", number, labels), Counter("specdec:errors", 3, labels)]
        worker.write(partial(prometheus_text, figures))
    page = page_of(tmp_path)
    for number, worker in enumerate(workers):
        labels = f'{{proposer="a \\"quoted\\" one",worker="{worker.file.stem}"}}'
        assert f"specdec:proposer_enabled{labels} {number}.0" in page
        assert f"specdec:errors_total{labels} 3.0" in page
        assert f'specdec:worker_silent_seconds{{worker="{worker.file.stem}"}}' in page
    assert page.count("# TYPE specdec:errors_total counter") == 1
    workers[0].remove()
    assert workers[0].file.stem not in page_of(tmp_path)


def test_a_registry_that_several_servers_make_for_one_page_has_them_too(tmp_path):
    worker = WorkersPage.of({VARIABLE: str(tmp_path)})
    worker.write(partial(prometheus_text, [Gauge("specdec:proposer_enabled", 1, {})]))
    registry = registry_with(Workers(tmp_path), CollectorRegistry)
    assert "specdec:proposer_enabled{" in generate_latest(registry).decode()


def test_without_a_folder_nothing_is_written(tmp_path):
    assert WorkersPage.of({}) is None
    assert WorkersPage.of({VARIABLE: str(tmp_path / "gone")}) is None
    assert page_of(tmp_path / "gone") == ""


def test_figures_that_change_while_they_are_read_are_written_the_next_time(tmp_path):
    worker = WorkersPage.of({VARIABLE: str(tmp_path)})

    def changing():
        raise RuntimeError("dictionary changed size during iteration")

    worker.write(partial(prometheus_text, [Gauge("specdec:proposer_enabled", 1, {})]))
    worker.write(changing)
    assert "specdec:proposer_enabled" in page_of(tmp_path)
