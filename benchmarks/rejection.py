"""The rejection sampler against what others do with the same logits and drafts, side by side in one run.

    python benchmarks/rejection.py --output benchmarks/results/rejection-cpu.json --device cpu --clock cpu
    python benchmarks/rejection.py --output benchmarks/results/rejection-cuda.json --device cuda

On CUDA the whole grid of shapes is run, each contender in a CUDA graph where it can be captured; on a CPU the shapes
of `CPU_GRID`. Contenders take turns within a round; medians over the rounds. Bytes per second are reported against
the bytes that any sampler must read (`specdec.core.rejection.cost`), not against those that a contender moves.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec.core.bench.environment import environment
from specdec.core.rejection import DraftLaws, DraftRows, LawKind, SamplingRows, verify
from specdec.core.rejection.cost import Step, minimum_bytes
from specdec.core.rejection.workspace import Workspace

VOCABS = {"32k": 32_000, "128k": 128_256, "152k": 151_936, "262k": 262_144}
FORMS = ("one_hot", "dense", "sparse")
TOP_M = 64
ACCEPTANCE = 0.7
GOAL_ON_CPU = 3.0


@dataclass(frozen=True)
class Shape:
    num_requests: int
    num_drafts: int
    vocab: str
    form: str
    filtered: bool
    dtype: str


CUDA_GRID = [
    Shape(*values)
    for values in itertools.product((1, 8, 64, 256), (1, 3, 5, 8), VOCABS, FORMS, (False, True), ("bf16", "fp32"))
]
CPU_GRID = [Shape(8, 5, "152k", form, filtered, "fp32") for filtered in (False, True) for form in FORMS]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One step's arguments, and the draft law as logits and probabilities for those who want them dense."""

    logits: Tensor  # [B (K + 1), V]
    draft_logits: Tensor  # [B, K, V]
    cu_rows: Tensor
    drafts: DraftRows
    sampling: SamplingRows
    shape: Shape


def case_of(shape: Shape, device: torch.device) -> Case:
    """Logits with a few likely tokens; drafts are accepted with a probability near 0.7 each."""
    generator = torch.Generator(device).manual_seed(0)
    batch, places, vocab = shape.num_requests, shape.num_drafts, VOCABS[shape.vocab]
    logits = torch.randn(batch, places + 1, vocab, generator=generator, device=device)
    likely = torch.randint(0, vocab, (batch, places + 1, 1), generator=generator, device=device)
    logits.scatter_(2, likely, 14.0)
    logits = logits.to(DTYPES[shape.dtype])
    draft_logits = logits[:, :-1].clone()
    if shape.form == "sparse":
        best = draft_logits.float().topk(TOP_M)
        laws = {"sparse_ids": best.indices, "sparse_probs": best.values.softmax(-1)}
    else:
        laws = {"probs": draft_logits.float().softmax(-1)}
    kind = {"dense": LawKind.DENSE_PROBS, "sparse": LawKind.SPARSE}.get(shape.form)
    right = torch.rand(batch, places, generator=generator, device=device) < ACCEPTANCE
    token_ids = torch.where(right, likely[:, :-1, 0], torch.randint_like(likely[:, :-1, 0], vocab))
    drafts = DraftRows(
        token_ids,
        torch.full((batch,), places, device=device),
        DraftLaws(torch.full((batch,), kind, dtype=torch.uint8, device=device), **laws) if kind else None,
    )

    def each(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device=device)

    sampling = SamplingRows(
        temperature=each(0.8),
        top_k=each(50 if shape.filtered else 0, torch.int64),
        top_p=each(0.9 if shape.filtered else 1.0),
        min_p=each(0.0),
        seed=torch.arange(batch, device=device),
        position=each(100, torch.int64),
        all_greedy=False,
        any_filter=shape.filtered,
    )
    cu_rows = torch.arange(batch + 1, device=device) * (places + 1)
    return Case(logits.flatten(0, 1), draft_logits, cu_rows, drafts, sampling, shape)


def ours(case: Case) -> Callable[[], object]:
    workspace = Workspace.plan(*case.drafts.token_ids.shape, case.logits.shape[1], case.logits.device)
    return lambda: verify(case.logits, case.cu_rows, case.drafts, case.sampling, None, workspace)


def filtered_probs(case: Case) -> Tensor:
    """p of every row as eager torch makes it: temperature, top-k by topk, top-p by sort, softmax; float32."""
    scaled = case.logits.float() / 0.8
    if case.shape.filtered:
        scaled = scaled.masked_fill(scaled < scaled.topk(50).values[:, -1:], -torch.inf)
        values, order = scaled.sort(descending=True)
        probs = values.softmax(-1)
        dropped = probs.cumsum(-1) - probs >= 0.9
        scaled = scaled.scatter(1, order, values.masked_fill(dropped, -torch.inf))
    return scaled.softmax(-1)


def eager(case: Case) -> Callable[[], object]:
    """Softmax, ratio test, residual at every position, multinomial: the textbook in batched torch."""
    batch, places = case.drafts.token_ids.shape
    ids = case.drafts.token_ids.unsqueeze(2)
    q = one_hot(case) if case.shape.form == "one_hot" else case.draft_logits.float().softmax(-1)

    def run() -> Tensor:
        p = filtered_probs(case).view(batch, places + 1, -1)
        ratio = p[:, :-1].gather(2, ids) / q.gather(2, ids)
        accepted = (torch.rand_like(ratio) < ratio).squeeze(2).long().cumprod(1).sum(1)
        residual = torch.cat(((p[:, :-1] - q).clamp(min=0), p[:, -1:]), 1)
        weights = residual[torch.arange(batch, device=p.device), accepted]
        return torch.multinomial(weights, 1)

    return run


def one_hot(case: Case) -> Tensor:
    return torch.zeros_like(case.draft_logits, dtype=torch.float32).scatter_(2, case.drafts.token_ids.unsqueeze(2), 1.0)


def hugging_face(case: Case) -> Callable[[], object]:
    """transformers' `_speculative_sampling`, one request at a time, as it is written; filters before it as above."""
    from transformers.generation.utils import _speculative_sampling

    batch, places = case.drafts.token_ids.shape
    candidates = one_hot(case).log() if case.shape.form == "one_hot" else case.draft_logits.float()

    def run() -> None:
        if case.shape.filtered:
            rows = filtered_probs(case).log().view(batch, places + 1, -1)
        else:
            rows = (case.logits.float() / 0.8).view(batch, places + 1, -1)
        for b in range(batch):
            one = slice(b, b + 1)
            _speculative_sampling(case.drafts.token_ids[one], candidates[one], places, rows[one])

    return run


def flashinfer(case: Case) -> Callable[[], object]:
    """FlashInfer's chain kernel behind a softmax and its renormalisations."""
    from flashinfer import sampling as peer

    batch, places = case.drafts.token_ids.shape
    q = one_hot(case) if case.shape.form == "one_hot" else case.draft_logits.float().softmax(-1)

    def run() -> object:
        p = peer.softmax(case.logits.float(), temperature=0.8)
        if case.shape.filtered:
            p = peer.top_p_renorm_probs(peer.top_k_renorm_probs(p, 50), 0.9)
        ids = case.drafts.token_ids.int()
        return peer.chain_speculative_sampling(q, ids, p.view(batch, places + 1, -1))

    return run


CONTENDERS: dict[str, Callable[[Case], Callable[[], object]]] = {"ours": ours, "torch eager": eager}


def contenders(device: torch.device) -> dict[str, Callable[[Case], Callable[[], object]]]:
    found = dict(CONTENDERS)
    if device.type == "cpu":
        found["transformers"] = hugging_face
    elif importlib.util.find_spec("flashinfer"):
        found["flashinfer"] = flashinfer
    return found


def captured(run: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """The call as a replayed CUDA graph, or as it is where it cannot be captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except (RuntimeError, torch.AcceleratorError):
        torch.cuda.synchronize()
        return run, False
    return graph.replay, True


def seconds(run: Callable[[], object], device: torch.device, clock: str) -> float:
    """Seconds per call: on CUDA from events over twenty calls, on a CPU one call by the wall or the process clock."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 20e3
    now = time.process_time if clock == "cpu" else time.perf_counter
    started = now()
    run()
    return now() - started


def minimum_of(shape: Shape) -> float:
    dense = 4 if shape.form == "dense" else 0
    size = DTYPES[shape.dtype].itemsize
    return minimum_bytes(Step(shape.num_requests, shape.num_drafts, VOCABS[shape.vocab], size, dense), ACCEPTANCE)


def measure(shape: Shape, device: torch.device, rounds: int, clock: str) -> dict[str, object]:
    case = case_of(shape, device)
    runs, graphs = {}, {}
    for name, build in contenders(device).items():
        run = build(case)
        runs[name], graphs[name] = captured(run) if device.type == "cuda" else (run, False)
        runs[name]()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, device, clock))
    medians = {name: statistics.median(values) for name, values in times.items()}
    least = minimum_of(shape)
    return {
        **asdict(shape),
        "seconds": medians,
        "seconds_of_rounds": times,
        "in_a_graph": graphs,
        "minimum_bytes": least,
        "bytes_per_second_of_the_minimum": least / medians["ours"],
        "ratios": {name: value / medians["ours"] for name, value in medians.items() if name != "ours"},
    }


def print_row(result: dict) -> None:
    shape = f"B={result['num_requests']:<4}K={result['num_drafts']:<2} V={result['vocab']:<5}{result['form']:<8}"
    shape += f"{'filtered' if result['filtered'] else '':<9}{result['dtype']:<5}"
    ratios = "  ".join(f"{name} {ratio:6.2f}x" for name, ratio in result["ratios"].items())
    rate = result["bytes_per_second_of_the_minimum"] / 1e9
    print(f"{shape} {result['seconds']['ours'] * 1e6:10.1f} us {rate:8.1f} GB/s   {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    device = torch.device(arguments.device)
    record = {"environment": environment(device), "clock": arguments.clock, "rounds": arguments.rounds}
    if device.type == "cuda":
        record["device_name"] = torch.cuda.get_device_name(device)
    record |= {"goal_on_cpu": GOAL_ON_CPU, "results": []}
    for shape in CUDA_GRID if device.type == "cuda" else CPU_GRID:
        with torch.inference_mode():
            record["results"].append(measure(shape, device, arguments.rounds, arguments.clock))
        print_row(record["results"][-1])
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
