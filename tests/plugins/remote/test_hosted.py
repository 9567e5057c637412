"""What a hosted proposer is shown of texts that come by message: each token once and in order, and how they ended."""

from __future__ import annotations

import os
import signal
from collections import defaultdict

import pytest
from drafter_servers import hosted_with

from specdec.adapters.serving import hosted as module
from specdec.adapters.serving.sessions import Limits, Sessions
from specdec.adapters.serving.told_to_end import told_to_end
from specdec.sdk import Draft, Needs, ProposerBase
from specdec.sdk.errors import ProposerError, RequestError
from specdec.sdk.extensions import Ahead, Graphs, Trees
from specdec.sdk.wire import DRAFTED, End, Hello, Row, Start


class Remembers(ProposerBase):
    """Drafts the newest token, and remembers what it was shown."""

    def __init__(self, config):
        super().__init__(config)
        self.kept = defaultdict(list)  # by request: position, token, the one that follows
        self.ends = {}

    def observe(self, step):
        first = step.kept.token_offsets.tolist()
        columns = (step.kept.positions, step.kept.token_ids, step.kept.next_token_ids)
        rows = list(zip(*(each.tolist() for each in columns), strict=True))
        for b, (name, count) in enumerate(zip(step.request_ids, step.kept.num_kept.tolist(), strict=True)):
            self.kept[name] += rows[first[b] : first[b] + count]

    def propose(self, step):
        return Draft(step.newest_token[:, None].expand(-1, step.width), step.budget)

    def on_finish(self, request):
        self.ends[request.request_id] = (request.end.reason, list(request.end.output_token_ids))


class OnDevice(Remembers):
    """Is shown what a device computed, rejected drafts between the others."""

    needs = Needs(placement="device")


class Grows(ProposerBase):
    """Drafts the same tree behind every token, and remembers which of its nodes were accepted."""

    needs = Needs(extensions=(Trees(),))

    def __init__(self, config):
        super().__init__(config)
        self.nodes = []

    def observe(self, step):
        self.nodes += step.accepted_nodes.tolist()

    def propose(self, step):
        return Draft.from_trees([[(-1, 40), (-1, 41), (0, 42)][:budget] for budget in step.budget.tolist()], step.width)


def hosted_remembering(proposer=Remembers):
    hosted = hosted_with({"method": f"{__name__}:{proposer.__name__}", "num_speculative_tokens": 4})
    return hosted, hosted.host.proposer


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("proposer", [Remembers, OnDevice], ids=["host", "device"])
def test_every_token_is_shown_once_in_order_however_much_comes_at_a_time(proposer, chunk, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    hosted, shown = hosted_remembering(proposer)
    texts = {"a": [*range(1, 12)], "b": [*range(20, 25)]}
    for name, prompt in texts.items():
        hosted.start(name, Start(name, list(prompt)))
    news = [  # tokens, drafts verified, drafts accepted
        {"a": ([5], 0, 0), "b": ([6], 0, 0)},
        {"a": ([5, 5, 9], 4, 2), "b": ([6, 7], 4, 1)},
        {"b": ([30, 31, 32, 33, 34], 0, 0), "a": ([40, 41, 42, 43], 0, 0)},
        {"a": ([8], 4, 0)},
        {"b": ([1], 2, 0), "a": ([2], 1, 0)},
    ]
    for step in news:
        rows = [(name, Row(name, len(texts[name]), new, 4, *counts)) for name, (new, *counts) in step.items()]
        for name, (new, *_) in step.items():
            texts[name] += new
        for row in hosted.step(rows):
            newest = texts[row.request_id][-1]
            assert (row.state, row.length, row.tokens) == (DRAFTED, len(texts[row.request_id]), [newest] * 4)
    for name, text in texts.items():
        assert shown.kept[name] == [(i, text[i], text[i + 1]) for i in range(len(text) - 1)]


def test_a_proposer_of_trees_is_told_which_of_its_nodes_were_accepted() -> None:
    hosted = hosted_with({"method": f"{__name__}:Grows", "num_speculative_tokens": 3, "max_nodes": 3})
    hosted.start("a", Start("a", [1, 2, 3]))
    shown, length = hosted.host.proposer.nodes, 3
    steps = [  # tokens, drafts verified, drafts accepted; nodes
        ([7], 0, 0, []),
        ([40, 9], 2, 1, [0]),
        ([40, 42, 9], 2, 2, [0, 2]),
        ([50, 9], 1, 1, []),  # of another drafter: no nodes of its
        ([40, 42, 9], 2, 2, [0, 2]),
    ]
    for tokens, verified, accepted, nodes in steps:
        [row] = hosted.step([("a", Row("a", length, tokens, 3, verified, accepted))])
        assert row.tokens == [40, 42], "the first path"
        assert shown[-1] == [*nodes, *[-1] * (3 - len(nodes))]
        length += len(tokens)


class Fails(Remembers):
    """Raises where it is to draft."""

    def propose(self, step):
        raise ValueError("not today")


def test_a_request_whose_step_failed_has_ended_and_begins_anew() -> None:
    hosted, shown = hosted_remembering(Fails)
    hosted.start("a", Start("a", [1, 2, 3]))
    with pytest.raises(ProposerError, match="not today"):
        hosted.step([("a", Row("a", 3, [7], 4))])
    assert shown.ends == {"a": ("abort", [7])}


class Refuses(Remembers):
    """Fails to begin with requests that begin with 9, and drafts for no others: it knows nothing of them."""

    def on_start(self, request):
        if request.prompt_token_ids[0] == 9:
            raise ValueError("not this one")

    def propose(self, step):
        wanted = [each.prompt_token_ids[0] for each, budget in zip(step.requests, step.budget, strict=True) if budget]
        assert 9 not in wanted
        return super().propose(step)


def test_a_request_that_the_proposer_failed_to_begin_with_takes_no_drafts_from_others() -> None:
    hosted, _ = hosted_remembering(Refuses)
    hosted.start("a", Start("a", [1, 2, 3]))
    with pytest.raises(ProposerError, match="not this one"):
        hosted.start("b", Start("b", [9, 2, 3]))
    for length in (3, 4):
        drafts = hosted.step([(name, Row(name, length, [7], 4)) for name in ("a", "b")])
        assert [(each.state, bool(each.tokens)) for each in drafts] == [(DRAFTED, True), (DRAFTED, False)]


@pytest.mark.parametrize(
    ("end", "reason", "outputs"),
    [
        (End("a", "stop", 4, [8, 9]), "stop", [7, 8, 9]),
        (End("a", "length", 3, [6]), "length", [6]),
        (End("a", "something new", 4, []), "abort", [7]),
        (End("a", "stop", 9, [1]), "abort", [7]),
        (None, "abort", [7]),
    ],
    ids=["stop", "replaced", "unknown reason", "does not follow", "aborted"],
)
def test_the_end_of_a_request_is_told_with_its_last_tokens(end, reason, outputs) -> None:
    hosted, shown = hosted_remembering()
    hosted.start("a", Start("a", [1, 2, 3]))
    hosted.step([("a", Row("a", 3, [7], 1))])
    hosted.end("a", end)
    assert shown.ends == {"a": (reason, outputs)}
    hosted.end("a", end)
    assert len(shown.ends) == 1


def test_a_text_may_be_as_long_as_the_target_reads_and_no_longer() -> None:
    hosted, _ = hosted_remembering()
    longest = hosted.info.max_model_len
    hosted.start("a", Start("a", [1] * longest))
    hosted.start("b", Start("b", [1] * (longest - 1)))
    [row] = hosted.step([("b", Row("b", longest - 1, [2], 4))])
    assert (row.state, row.length, row.tokens) == (DRAFTED, longest, [])
    with pytest.raises(RequestError, match="SD-E331"):
        hosted.step([("b", Row("b", longest, [2], 4))])
    with pytest.raises(RequestError, match="SD-E331"):
        hosted.start("c", Start("c", [1] * (longest + 1)))


def test_clients_are_counted_from_one_and_named() -> None:
    sessions = Sessions(Limits(), lambda: 0.0, lambda name: None)
    labels = [sessions.open(name.encode(), Hello(1, 10, 10, 1, name)).label for name in ("", "one", "two")]
    assert labels == ["client 1", "client 2 (one)", "client 3 (two)"]
    assert sessions.get(b"two").name_of("a") == "000003/a"


def test_more_signals_than_a_pipe_holds_end_a_server_once() -> None:
    def gives_up(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, gives_up), signal.getsignal(signal.SIGTERM)
    signal.alarm(60)
    try:
        with told_to_end() as ended:
            for _ in range(70_000):
                signal.raise_signal(signal.SIGTERM)
            assert set(os.read(ended, 100_000)) == {ord("!")}
        assert signal.getsignal(signal.SIGTERM) == before[1]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before[0])


@pytest.mark.slow
@pytest.mark.parametrize("is_told_before", [True, False], ids=["at once", "later"])
def test_a_fork_ends_by_a_signal_that_is_for_it_and_its_server_is_not_told(is_told_before) -> None:
    """A signal that comes before the fork has begun to run is not lost either."""
    with told_to_end() as ended:
        for _ in range(12):
            pid = os.fork()
            if pid == 0:
                if is_told_before:
                    signal.pause()
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            if is_told_before:
                os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        os.set_blocking(ended, False)
        with pytest.raises(BlockingIOError):
            os.read(ended, 1)
        signal.raise_signal(signal.SIGTERM)
        assert os.read(ended, 1) == b"!"


class TellsExtensions(Remembers):
    """Keeps what its engine offers."""

    def bind(self, target, services):
        self.offered = target.extensions


@pytest.mark.parametrize("ahead", [0, 1, 8])
def test_drafting_ahead_is_offered_where_anything_is_prepared(ahead) -> None:
    config = {"method": f"{__name__}:TellsExtensions", "num_speculative_tokens": 4}
    assert (Ahead.id in hosted_with(config, ahead=ahead).host.proposer.offered) == (ahead > 0)


class Compiles(Remembers):
    """Has a function compiled, as far as its engine does that."""

    needs = Needs(extensions=(Graphs(),))

    def bind(self, target, services):
        self.function = services.compile(abs)


@pytest.mark.parametrize("asked", [False, True])
def test_functions_are_compiled_only_where_that_is_asked_for(asked) -> None:
    config = {"method": f"{__name__}:Compiles", "num_speculative_tokens": 4}
    assert (hosted_with(config, torch_compile=asked).host.proposer.function is not abs) == asked
