"""What Triton compiles a kernel for, as its own binder sees real launches: no GPU and no compiler is needed.

`Keys` stands for the device in a process that does not interpret kernels. A launch adds the key under which Triton
would look for its kernel: types, specialised numbers, alignment, constants and options.

    python keys.py

prints one JSON object for each configuration: how many kernels a warm-up compiles, and what later calls would add.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.kernels.cuda.warm_up import warm_up_verification
from specdec.core.kernels.cuda.workspace import Workspace
from specdec.core.proposing.draft_store import DistributionBuffers
from specdec.core.rejection.types import DraftRows, SamplingRows

CPU = torch.device("cpu")
DEVICE = {
    "get_current_device": lambda: 0,
    "get_current_stream": lambda device: 0,
    "get_current_target": lambda: GPUTarget("cuda", 90, 32),
    "get_active_torch_device": lambda: CPU,
}


class Keys:
    """Gathers the keys of launches instead of launching."""

    def __init__(self):
        self.found = {}
        self.label = ""
        driver.set_active(SimpleNamespace(**DEVICE))
        jit.JITFunction.run = lambda kernel, *args, **named: self._add(kernel, *args, **named)

    def _add(self, kernel, *args, grid, warmup, **options):
        *_, binder = kernel.device_caches[0]
        _, specialization, given = binder(*args, **options)
        self.found.setdefault((kernel.__name__, str(specialization), str(given)), self.label)

    def report(self, name, before):
        new = {key: label for key, label in self.found.items() if key not in before}
        return {
            "name": name,
            "warmed": dict(Counter(key[0] for key in before)),
            "added": [[*k, v] for k, v in new.items()],
        }


def sampling(count, filters, skew):
    """Columns of a packed upload: they begin where they may."""

    def column(dtype):
        return torch.ones(count + skew, dtype=dtype)[skew:]

    i, f = (partial(column, dtype) for dtype in (torch.int64, torch.float32))
    return SamplingRows(f(), i(), f(), f(), i(), i(), all_greedy=False, any_filter=filters)


def with_parents(drafts, skew):
    """As an engine takes them: whether siblings were put back is said of all that were drawn."""
    parents = torch.zeros(drafts.token_ids.numel() + skew, dtype=torch.int64)[skew:].view(drafts.token_ids.shape)
    given = drafts.distributions
    if given is not None:
        given = replace(given, replacement=torch.zeros(len(drafts.lengths) + skew, dtype=torch.bool)[skew:])
    return replace(drafts, parents=parents, distributions=given)


def check(keys, name, rule, form, *, vocab, width, most=256, k=5, t2d=False, trees=False):
    keys.found.clear()
    mapping = torch.zeros(vocab, dtype=torch.int64) if t2d else None
    buffers = DistributionBuffers.none()
    if form != "one_hot":
        buffers = DistributionBuffers.allocate(form, (most, k, width), mapping, CPU)
    workspace = Workspace.plan(most, k, vocab, CPU, width if form == "dense" else 0)
    logits = torch.empty(most * (k + 1), vocab, dtype=torch.bfloat16)
    warm_up_verification(rule, workspace, logits[:1], buffers.examples, trees=trees)
    before = set(keys.found)
    kinds = {"one_hot": [], "sparse": [3], "dense": [1, 2]}[form]
    for count, drafted, filters, skew in product((1, 2, 15, 16, 17, 64, 129, 256), range(k + 1), (False, True), (0, 1)):
        if count > most:
            continue
        rows = torch.arange(count)
        for kind in [None, *kinds] if drafted else [None]:
            keys.label = f"{count} requests, {drafted} drafts, filters {filters}, kind {kind}, skew {skew}"
            taken = None
            if kind is not None:
                taken = buffers.gather(rows, torch.full((count,), kind), frozenset([kind]), drafted)
            ids = torch.zeros(count * drafted + skew, dtype=torch.int64)[skew:].view(count, drafted)
            drafts = DraftRows(ids, torch.zeros(count + skew, dtype=torch.int64)[skew:], taken)
            cu_rows = torch.zeros(count + 1 + skew, dtype=torch.int64)[skew:]
            every = [drafts, with_parents(drafts, skew)] if trees and drafted else [drafts]
            for each in every:
                rule(logits[: count * (drafted + 1)], cu_rows, each, sampling(count, filters, skew), None, workspace)
    return keys.report(name, before)


if __name__ == "__main__":
    keys = Keys()
    standard, block = triton_backend.verify, partial(triton_backend.verify, together=True)
    for name, rule, form, rest in (
        ("one_hot", standard, "one_hot", {"vocab": 32000, "width": 0}),
        ("sparse", standard, "sparse", {"vocab": 32000, "width": 256}),
        ("sparse of 20 entries, few requests", standard, "sparse", {"vocab": 32000, "width": 20, "most": 8}),
        ("sparse, odd vocabulary, many drafts", standard, "sparse", {"vocab": 9001, "width": 7, "most": 17, "k": 18}),
        ("dense", standard, "dense", {"vocab": 8192, "width": 2048, "t2d": True, "most": 129}),
        ("dense, odd vocabulary", standard, "dense", {"vocab": 1003, "width": 1003, "most": 17}),
        ("block sparse", block, "sparse", {"vocab": 32000, "width": 256}),
        ("block dense", block, "dense", {"vocab": 8192, "width": 2048, "most": 129}),
        ("trees", standard, "one_hot", {"vocab": 32000, "width": 0, "trees": True}),
        ("drawn trees, sparse", standard, "sparse", {"vocab": 32000, "width": 256, "most": 17, "k": 18, "trees": True}),
        ("drawn trees, block, dense", block, "dense", {"vocab": 1003, "width": 1003, "most": 17, "trees": True}),
    ):
        print(json.dumps(check(keys, name, rule, form, **rest)), flush=True)
