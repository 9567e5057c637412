"""The rejection sampler against what others do with the same logits and drafts, side by side in one run.

    python -m benchmarks.rejection --output benchmarks/results/rejection-cpu.json --device cpu --clock cpu
    python -m benchmarks.rejection --output benchmarks/results/rejection-cuda.json --device cuda

On CUDA the whole grid of shapes is run in a fixed random order, each contender in a CUDA graph where it can be
captured, with the L2 cache flushed before every call (and once more without, for ours). On a CPU the shapes of the
goal come first. A run ends with its grid or its `--minutes`, and says how many shapes it left out. Contenders take
turns within a round; medians over the rounds. Bytes per second are reported against the bytes that any sampler must
read (`benchmarks.verification_cost`), not against those that a contender moves.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarks.verification_cost import Step, minimum_bytes
from torch import Tensor

from specdec.core.kernels.cuda.workspace import Workspace
from specdec.core.rejection import DistributionKind, DraftDistributions, DraftRows, SamplingRows, verify
from specdec.lab.environment import environment

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
GOAL_GRID = [Shape(8, 5, "152k", form, filtered, "fp32") for filtered in (False, True) for form in FORMS]
CPU_GRID = GOAL_GRID + [
    Shape(*values)
    for values in itertools.product((1, 8), (1, 5), ("32k", "152k"), FORMS, (False, True), ("bf16", "fp32"))
    if Shape(*values) not in GOAL_GRID
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One step's arguments, and the draft distribution as logits and probabilities for those who want them dense."""

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
        distributions = {"sparse_ids": best.indices, "sparse_probs": best.values.softmax(-1)}
    else:
        distributions = {"draft_probs": draft_logits.float().softmax(-1)}
    kind = {"dense": DistributionKind.DENSE_PROBS, "sparse": DistributionKind.SPARSE}.get(shape.form)
    right = torch.rand(batch, places, generator=generator, device=device) < ACCEPTANCE
    token_ids = torch.where(right, likely[:, :-1, 0], torch.randint_like(likely[:, :-1, 0], vocab))
    drafts = DraftRows(
        token_ids,
        torch.full((batch,), places, device=device),
        DraftDistributions(torch.full((batch,), kind, dtype=torch.uint8, device=device), **distributions)
        if kind
        else None,
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


def vllm(case: Case) -> Callable[[], object]:
    """vLLM's V1 sampler, bonus tokens included, as its runner calls it."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    batch, places = case.drafts.token_ids.shape
    metadata = SpecDecodeMetadata.make_dummy(case.drafts.token_ids.tolist(), case.logits.device)
    rows = torch.arange(len(case.logits), device=case.logits.device).view(batch, places + 1)
    metadata.target_logits_indices = rows[:, :-1].flatten()
    metadata.bonus_logits_indices = rows[:, -1]
    penalty = torch.zeros(batch, device=case.logits.device)
    sampling = SamplingMetadata(
        temperature=case.sampling.temperature,
        all_greedy=False,
        all_random=True,
        top_p=case.sampling.top_p if case.shape.filtered else None,
        top_k=case.sampling.top_k.int() if case.shape.filtered else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=penalty,
        presence_penalties=penalty,
        repetition_penalties=penalty + 1,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = RejectionSampler(Sampler())
    q = None if case.shape.form == "one_hot" else case.draft_logits.float().softmax(-1).flatten(0, 1).contiguous()
    return lambda: sampler(metadata, q, case.logits, sampling)


@dataclass(frozen=True)
class Contender:
    """What is measured, and where it can be."""

    build: Callable[[Case], Callable[[], object]]
    package: str = "torch"
    devices: tuple[str, ...] = ("cpu", "cuda")


CONTENDERS = {
    "ours": Contender(ours),
    "torch eager": Contender(eager),
    "transformers": Contender(hugging_face, "transformers", ("cpu",)),
    "vllm": Contender(vllm, "vllm", ("cuda",)),
    "flashinfer": Contender(flashinfer, "flashinfer", ("cuda",)),
}


def prepared(
    case: Case, device: torch.device
) -> tuple[dict[str, Callable[[], object]], dict[str, str], dict[str, bool]]:
    """(calls that have run once, why others have not, which are replayed graphs)."""
    runs: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    graphs: dict[str, bool] = {}
    for name, contender in CONTENDERS.items():
        if device.type not in contender.devices:
            continue
        if importlib.util.find_spec(contender.package) is None:
            missing[name] = "not installed"
            continue
        try:
            run = contender.build(case)
            run()
            runs[name], graphs[name] = captured(run) if device.type == "cuda" else (run, False)
        except Exception as error:
            if name == "ours":
                raise
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return runs, missing, graphs


def captured(run: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """The call as a replayed CUDA graph, or as it is where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except (RuntimeError, torch.AcceleratorError):
        torch.cuda.synchronize()
        return run, False
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, True


class CpuTimer:
    """Seconds of one call, by the wall clock or the process clock, which leaves out the time others had the core."""

    def __init__(self, clock: str) -> None:
        self._now = time.process_time if clock == "cpu" else time.perf_counter

    def __call__(self, run: Callable[[], object]) -> float:
        started = self._now()
        run()
        return self._now() - started


class CudaTimer:
    """Seconds of one call on the device, from events around each of several calls, the L2 cache flushed between."""

    SECONDS_PER_ROUND, MOST_CALLS = 0.01, 20

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._larger_than_the_cache = torch.empty(4 * size, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        once = self._timed(run, 1)[0]
        count = max(1, min(self.MOST_CALLS, int(self.SECONDS_PER_ROUND / max(once, 1e-7))))
        return statistics.median(self._timed(run, count))

    def back_to_back(self, run: Callable[[], object]) -> float:
        """Seconds per call of many in a row, which find in the cache what the call before left there."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(self.MOST_CALLS):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.MOST_CALLS

    def _timed(self, run: Callable[[], object], count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            self._larger_than_the_cache.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def minimum_of(shape: Shape) -> float:
    dense = 4 if shape.form == "dense" else 0
    size = DTYPES[shape.dtype].itemsize
    return minimum_bytes(Step(shape.num_requests, shape.num_drafts, VOCABS[shape.vocab], size, dense), ACCEPTANCE)


def measure(shape: Shape, device: torch.device, rounds: int, timer: CpuTimer | CudaTimer) -> dict[str, object]:
    runs, missing, graphs = prepared(case_of(shape, device), device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timer(run))
    medians = {name: statistics.median(values) for name, values in times.items()}
    least = minimum_of(shape)
    result = {
        **asdict(shape),
        "seconds": medians,
        "seconds_of_rounds": times,
        "not_run": missing,
        "in_a_graph": graphs,
        "minimum_bytes": least,
        "bytes_per_second_of_the_minimum": least / medians["ours"],
        "ratios": {name: value / medians["ours"] for name, value in medians.items() if name != "ours"},
    }
    if isinstance(timer, CudaTimer):
        result["seconds_back_to_back"] = timer.back_to_back(runs["ours"])
    return result


def print_row(result: dict) -> None:
    shape = f"B={result['num_requests']:<4}K={result['num_drafts']:<2} V={result['vocab']:<5}{result['form']:<8}"
    shape += f"{'filtered' if result['filtered'] else '':<9}{result['dtype']:<5}"
    others = [f"{name} {ratio:6.2f}x" for name, ratio in result["ratios"].items()]
    others += [f"{name} {reason}" for name, reason in result["not_run"].items()]
    rate = result["bytes_per_second_of_the_minimum"] / 1e9
    print(f"{shape} {result['seconds']['ours'] * 1e6:10.1f} us {rate:8.1f} GB/s   {'  '.join(others)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(arguments.num_threads)
    device = torch.device(arguments.device)
    record = {"environment": environment(device), "clock": arguments.clock, "rounds": arguments.rounds}
    grid, timer = list(CPU_GRID), CpuTimer(arguments.clock)
    if device.type == "cuda":
        record |= {"clock": "device", "device_name": torch.cuda.get_device_name(device)}
        grid, timer = random.Random(0).sample(CUDA_GRID, len(CUDA_GRID)), CudaTimer(device)
    record |= {"goal_on_cpu": GOAL_ON_CPU, "shapes_left_out": len(grid), "results": []}
    for shape in grid:
        if time.perf_counter() - started > 60 * arguments.minutes:
            break
        with torch.inference_mode():
            record["results"].append(measure(shape, device, arguments.rounds, timer))
        record["shapes_left_out"] -= 1
        print_row(record["results"][-1])
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=2) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"{record['shapes_left_out']} of {len(grid)} shapes left out")


if __name__ == "__main__":
    main()
