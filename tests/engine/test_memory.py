"""The KV cache is sized from what the user gives, or from what the largest step leaves of a device."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import make_llm
from inside import target_of

from specdec.core import device_memory
from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.memory import left_by_a_step
from specdec.sdk import ConfigError
from specdec.testing.isolated import in_a_fork

GIB = 2**30


class Card:
    """A device of 10 GiB on which the work takes 4, weights included."""

    def __init__(self, device=None):
        self.num_runs = 0

    def total(self):
        return 10 * GIB

    def peak(self, work):
        work()
        self.num_runs += 1
        return 4 * GIB


@pytest.fixture(scope="module")
def target():
    return target_of(make_llm())


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_the_cache_gets_what_a_step_leaves_of_the_given_share(share, target):
    config = EngineConfig(model="tiny", gpu_memory_utilization=share, max_num_batched_tokens=32, max_num_seqs=4)
    card = Card()
    assert left_by_a_step(config, target, memory=lambda device: card) == int(share * 10 * GIB) - 4 * GIB
    assert card.num_runs == 1


def test_a_dummy_pass_is_as_large_as_the_largest_step(target):
    shapes = []
    hook = target.model.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.logits.shape)))
    target.dummy_pass(64, 16)
    hook.remove()
    assert shapes == [(1, 16, target.config.vocab_size)]


def test_a_share_outside_of_the_device_is_refused():
    for share in (0, 1.5):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            EngineConfig(model="tiny", gpu_memory_utilization=share)


def test_another_default_device_than_the_host_is_refused_before_anything_is_loaded():
    with torch.device("meta"), pytest.raises(ConfigError, match=r"(?s)SD-E346.*found +meta.*set_default_device"):
        make_llm()


def test_a_budget_that_holds_no_block_is_refused():
    with pytest.raises(ConfigError, match="SD-E150"):
        make_llm(kv_cache_memory_gib=1e-6)


def test_forks_write_to_their_own_keys_however_much_memory_was_asked_for():
    """More than the machine has: a private mapping that reserved it could not be forked."""
    rows = 2 * device_memory.psutil.virtual_memory().total // 2**20
    keys = [device_memory.lazy_zeros((rows, 2**18), torch.float32, torch.device("cpu")) for _ in range(2)]
    assert in_a_fork(lambda: str(keys[1][:2, :2].fill_(1).tolist()), 20) == f"{[[1.0] * 2] * 2}\n"
    assert not keys[1][:2, :2].any()


def test_the_limit_of_a_container_counts_without_what_only_caches_files(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "CGROUP", tmp_path)
    machine = device_memory.free_memory(torch.device("cpu"))
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\nactive_file 1500\ninactive_file 400\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory.free_memory(torch.device("cpu")) > machine // 2
    for limit, free in ((6000, 2900), (4000, 900), (3000, 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert device_memory.free_memory(torch.device("cpu")) == free
