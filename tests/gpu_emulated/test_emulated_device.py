"""The emulated device refuses what a device refuses, and counts what its host waits for, sends and launches."""

from __future__ import annotations

import threading

import pytest
import torch
from emulated_cuda import GIB, WrongDevice, emulated_cuda

from specdec.core.cache.transfer import upload
from specdec.core.proposing.draft_check import DraftChecker
from specdec.core.proposing.top_tokens import TopTokens
from specdec.core.runner.sampling import on_its_way
from specdec.sdk import Draft, Needs
from specdec.sdk.errors import PluginId
from specdec.sdk.extensions import Trees
from specdec.testing import step_view


def record(work, pool=None):
    """A graph of work, and what the capture returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result


def test_results_are_real_and_lie_on_the_device(cuda):
    x = torch.arange(6, device="cuda").view(2, 3)
    assert x.device == torch.device("cuda:0")
    assert (x * 2).sum(1).tolist() == [6, 24]
    with torch.cuda.device(1):
        assert torch.ones(2, device="cuda").device == torch.device("cuda:1")


WAITS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0]),
    "int": lambda x: int(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "pageable": lambda x: x + torch.tensor([1.0, 2.0, 3.0]).to(x.device),
    "numbers": lambda x: torch.tensor([1.0], device=x.device),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_counted(what, cuda):
    x = torch.tensor([1.0, 0.0, 2.0]).to("cuda")
    with cuda.counting() as counts:
        WAITS[what](x)
    assert counts.waits.total() == 1


def test_pinned_numbers_are_sent_without_a_wait(cuda):
    with cuda.counting() as counts:
        torch.tensor([1, 2], pin_memory=True).to("cuda", non_blocking=True)
        torch.empty(3, pin_memory=True).to("cuda", non_blocking=True)
    assert counts.figures() == {"waits": 0, "uploads": 2, "launches": 0, "replays": 0, "nodes": 0}


def test_numbers_that_nobody_waits_for_are_there_after_the_next_wait(cuda):
    first, second = torch.ones(3, device="cuda"), torch.full((2,), 2.0, device="cuda")
    with cuda.counting() as counts:
        coming = first.to("cpu", non_blocking=True)
        assert coming.isnan().all()
        assert second.tolist() == [2, 2]
    assert coming.tolist() == [1, 1, 1]
    assert counts.waits.total() == 1


def test_operators_are_launches_and_views_are_none(cuda):
    x = torch.ones(4, 4, device="cuda")
    with cuda.counting() as counts:
        x.t()[1:].unsqueeze(0)
        x.add_(1).mul(2)
        torch.empty(3, device="cuda")
    assert counts.launches == {"add_": 1, "mul": 1}


def test_mixed_devices_are_refused(cuda):
    here = torch.ones(2, device="cuda:0")
    with torch.cuda.device(1):
        there = torch.ones(2, device="cuda:1")
    for other in (there, torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
    assert (here + torch.tensor(1.0)).tolist() == [2, 2], "a single number may come from the host"


def test_launches_on_a_device_that_is_not_current_are_refused(cuda):
    kernel = cuda.kernel(torch.add, launches=1)
    x = torch.ones(2, device="cuda:0")
    with torch.cuda.device(1):
        for launch in (lambda: x + 1, lambda: kernel(x, x), lambda: torch.ones(2, device="cuda:0")):
            with pytest.raises(WrongDevice):
                launch()


def test_a_replay_computes_anew_without_python(cuda):
    x, runs = torch.ones(2, device="cuda"), []
    graph, y = record(lambda: (runs.append(1), x * 3 + 1)[1])
    assert y.isnan().all().item(), "a capture computes nothing"
    for value in (1.0, 5.0):
        x.fill_(value)
        with cuda.counting() as counts:
            graph.replay()
        assert y.tolist() == [3 * value + 1] * 2
    assert (counts.replays, counts.nodes, counts.launches.total()) == (1, 2, 0)
    assert runs == [1]


def test_a_kernel_stands_as_so_many_launches_and_is_replayed(cuda):
    x = torch.ones(2, device="cuda")
    kernel = cuda.kernel(lambda value: value.tolist() and value.add_(1), launches=3)
    graph, _ = record(lambda: kernel(x))
    x.zero_()
    with cuda.counting() as counts:
        graph.replay()
        kernel(x)
    assert (counts.nodes, counts.launches.total(), x.tolist()) == (3, 3, [2, 2])


@pytest.mark.parametrize("poison", [True, False])
def test_replays_overwrite_what_others_left_in_their_pool(poison):
    with emulated_cuda(poison=poison):
        pool, x = torch.cuda.graph_pool_handle(), torch.ones(1000, device="cuda")
        first, _ = record(lambda: (x * 3 + 1).sum(), pool)
        second, left = record(lambda: x * 7, pool)  # where `x * 3` lay
        third, alone = record(lambda: x * 7)
        for graph in (second, third, first):
            graph.replay()
        assert left[0].item() != 7
        assert alone[0].item() == 7


def test_host_reads_inside_of_a_capture_break_it(cuda):
    x = torch.ones(2, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="previous error"):
        record(x.tolist)
    assert torch.cuda.current_stream() is not before, "torch leaves its stream context open"


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_other_threads_break_a_capture_unless_it_is_of_its_thread(mode, cuda):
    x, refused = torch.ones(2, device="cuda"), []

    def read():
        try:
            x.tolist()
        except RuntimeError as error:
            refused.append(error)

    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode=mode)
    x.add_(1)
    other = threading.Thread(target=read)
    other.start()
    other.join()
    if mode == "global":
        with pytest.raises(RuntimeError, match="previous error"):
            graph.capture_end()
    else:
        graph.capture_end()
    assert bool(refused) == (mode == "global")


def test_an_empty_capture_warns(cuda):
    x = torch.ones(2, 3, device="cuda")
    with pytest.warns(UserWarning, match="empty"):
        record(x.t)


def test_memory_is_counted_and_runs_out():
    with emulated_cuda(memory=GIB):
        x = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
        view = x[10:]
        assert torch.cuda.mem_get_info() == (GIB // 2, GIB)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(GIB, dtype=torch.uint8, device="cuda")
        del x
        assert torch.cuda.memory_allocated() == GIB // 2, "its view still holds it"
        del view
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_reserved() == GIB // 2


def test_nothing_of_it_is_left_afterwards():
    with emulated_cuda():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    assert type(torch.tensor([1])) is torch.Tensor


def test_the_device_of_a_context_is_that_of_new_tensors(cuda):
    with torch.device("meta"):
        assert torch.tensor([1]).device.type == "meta"
    with torch.device("cuda"):
        assert torch.tensor([1]).device == torch.device("cuda:0")


@pytest.mark.parametrize("floats", [(), ([0.5], [1.5, 2.5, 3.5, 4.5, 5.5])], ids=["integers", "floats too"])
def test_lists_come_to_a_device_as_they_are_each_at_a_multiple_of_sixteen_bytes(cuda, floats):
    lists = ([1, 2, 3], [], [4], [5, 6])
    with cuda.counting() as counts:
        sent = upload(lists, torch.device("cuda:0"), floats)
    assert counts.figures()["uploads"] == 1
    assert [each.tolist() for each in sent] == [*lists, *map(list, floats)]
    assert {each.storage_offset() * each.itemsize % 16 for each in sent} == {0}


def test_the_likely_tokens_come_to_the_host_as_they_are_with_one_wait(cuda):
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    expected = TopTokens.of(logits, torch.tensor([0, 2]), 3, 2)
    there = TopTokens.of(logits.to("cuda"), torch.tensor([0, 2]).to("cuda"), 3, 2)
    with cuda.counting() as counts:
        found = there.on_host()
    assert counts.waits.total() == 1
    assert found.ids.tolist() == expected.ids.tolist()
    assert torch.equal(found.logprobs, expected.logprobs)


def test_log_probabilities_are_sent_to_the_host_without_a_wait(cuda):
    packed = {"a": torch.rand(2, 4, device="cuda"), "b": torch.rand(1, 6, device="cuda")}
    with cuda.counting() as counts:
        coming = on_its_way(packed)
    assert counts.waits.total() == 0
    assert packed["a"].tolist() == coming["a"].tolist()
    assert packed["b"].tolist() == coming["b"].tolist()


@pytest.mark.parametrize("parents", [None, [[-1, 0, 0]]], ids=["chain", "tree"])
def test_a_draft_on_a_device_is_read_with_one_wait(parents, cuda):
    needs = Needs(placement="device", extensions=() if parents is None else (Trees(),))
    checker = DraftChecker(PluginId("mine", "mypkg:Mine", None, None), needs, 100, torch.device("cuda"), max_depth=3)
    there = {name: torch.tensor(each, device="cuda") for name, each in (("lengths", [3]), ("token_ids", [[4, 5, 6]]))}
    if parents is not None:
        there["parents"] = torch.tensor(parents, device="cuda")
    step = step_view([[1, 2]], num_draft_tokens=3)
    with cuda.counting() as counts:
        checked = checker.check(Draft(**there), step, [3])
    assert counts.waits.total() == 1
    assert checked.token_ids == [[4, 5, 6]]
