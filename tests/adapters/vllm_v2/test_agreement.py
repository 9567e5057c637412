"""Ranks that draft differently verify the first rank's drafts: two processes, and a real group of both."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from specdec.adapters.vllm_v2.agreement import Agreement

DRAFTS = [[[5, 6, 7], [8], []], [[5, 6], [8], [9, 9, 9]]]  # of each rank


def as_rank(rank, place):
    """What a rank has agreed on, twice, and what it logged."""
    told = []
    logging.getLogger("specdec").addHandler(logging.Handler())
    logging.getLogger("specdec").handlers[-1].emit = lambda record: told.append(record.getMessage())
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    vllm = ModuleType("vllm.distributed")  # its group is one of torch's, by another name
    group = SimpleNamespace(ranks=[0, 1], cpu_group=dist.group.WORLD, broadcast=broadcast)
    vllm.get_tp_group = lambda: group
    sys.modules |= {"vllm": ModuleType("vllm"), "vllm.distributed": vllm}
    agreement = Agreement(2)
    agreed = [agreement.on(DRAFTS[rank], 3) for _ in range(2)]
    logits = torch.full((3, 2), float(rank))
    agreement.on_rows(logits, torch.tensor([0, 2]))
    return {"agreed": agreed, "told": told, "logits": logits.tolist()}


def broadcast(tensor, src):
    dist.broadcast(tensor, src)
    return tensor


def forked(work):
    """A pipe with what `work` returns in a fork of this process."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        with suppress(BaseException):
            os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    return reading


def test_every_rank_has_the_first_ranks_drafts_and_a_difference_is_told_once(tmp_path):
    pipes = [forked(lambda rank=rank: as_rank(rank, tmp_path / "group")) for rank in range(2)]
    found = []
    for each in pipes:
        with os.fdopen(each) as pipe:
            found.append(json.loads(pipe.read() or "{}"))
        os.wait()
    first, second = found
    assert first["agreed"] == second["agreed"] == [DRAFTS[0]] * 2
    assert first["told"] == []
    [told] = second["told"]
    assert "SD-W240" in told
    assert "[5, 6]" in told
    assert "[5, 6, 7]" in told
    assert first["logits"] == [[0.0, 0.0]] * 3
    assert second["logits"] == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


def test_one_rank_has_its_own_drafts_and_asks_nobody():
    assert Agreement(1).on(DRAFTS[1], 3) is DRAFTS[1]
