"""The engine on a CUDA device against the bandwidth of its memory and against transformers, in one run.

    python3 benchmarks/gpu.py --output benchmarks/results/gpu.json     # under nine minutes on an H200
    python3 benchmarks/gpu.py --smoke                                  # tiny models, on a CPU

A checkout is enough: where specdec is not installed, the one beside this file is taken. Missing packages are named.

Llama shapes of 1B and 8B parameters in bf16, made here: nothing is downloaded. Weights are random, but the head is the
embedding table turned by one token and the layers add little, so that a token is followed by its successor however a
batch is rounded. A decoding step at batch 1 has to read every weight but the embedding table once, so no engine makes
more than bandwidth / weight bytes tokens per second; the bandwidth is that of a copy, measured first, bytes read and
bytes written counted. Speculation is measured at a stated acceptance: its drafts are successors, spoiled at random, and
cost nothing. Greedy, prompts of random tokens, prefill included; first every contender once to warm up, then in turn,
medians over the rounds. transformers' `generate` is run as it comes: a dynamic cache, sdpa, no compilation.

Step overhead is what a decoding step takes beyond the target's forward pass on the device: scheduling, the batch,
verification, commit, and whatever the host adds to the launch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # behind what is installed

try:
    import torch
    import transformers
    from pydantic import Field
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdec import LLM, SamplingParams
    from specdec.core.host import parts_of
    from specdec.core.model.target import Target, TargetOutput
    from specdec.core.runner.batch import Batch
    from specdec.sdk import Draft, Needs, ProposerConfig, StepView, StrictModel
except ModuleNotFoundError as error:
    packages = ["torch", "transformers", "importlib-metadata", "pluggy", "prometheus-client", "psutil", "pydantic"]
    missing = [package for package in packages if find_spec(package.replace("-", "_")) is None]
    fix = f"python3 -m pip install {' '.join(missing)}" if missing else "a checkout with the links of src/specdec"
    sys.exit(f"benchmarks/gpu.py: {error}; missing here: {', '.join(missing) or error.name}\n  fix: {fix}")

WORST_SECONDS = 480  # rounds end when this much has passed: the whole run stays under nine minutes


@dataclass(frozen=True)
class Shape:
    """A model, and what it is asked for."""

    config: dict[str, int]
    batch_sizes: tuple[int, ...]
    prompt_len: int
    output_len: int


LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES = {
    "1B": Shape(LLAMA_1B | {"num_key_value_heads": 8, "vocab_size": 128256}, (1, 16, 64), 128, 128),
    "8B": Shape(LLAMA_8B | {"num_key_value_heads": 8, "vocab_size": 128256}, (1, 16, 64), 128, 128),
    "smoke": Shape(TINY | {"num_key_value_heads": 2, "vocab_size": 512}, (1, 2), 12, 8),
}
GOALS = {"of the floor": 0.75, "of transformers": 3.0, "step overhead, us": 100.0}


class Successors:
    """Drafts what the benchmark's models generate, each token spoiled with probability 1 - `acceptance`."""

    class Options(StrictModel):
        acceptance: float = Field(ge=0, le=1)

    needs = Needs()

    def __init__(self, config: ProposerConfig) -> None:
        self._acceptance = config.options.acceptance
        self._random = random.Random(0)

    def propose(self, step: StepView) -> Draft:
        """The tokens after each row's newest, as many as its budget."""
        drafts = [
            [newest + i + (1 if self._random.random() < self._acceptance else 2) for i in range(budget)]
            for newest, budget in zip(step.newest_token.tolist(), step.budget.tolist(), strict=True)
        ]
        return Draft.from_lists(drafts, step.num_draft_tokens)


def make_model(directory: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A model in which each token is followed by its successor, saved for the engine and returned for transformers."""
    config = LlamaConfig(
        **shape.config, max_position_embeddings=4096, rope_theta=500000.0, tie_word_embeddings=False, dtype=dtype
    )
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(previous)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, dims=0))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    model.generation_config.eos_token_id = None  # no contender ends early, and none checks for it
    return model


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that a copy reads and writes: the best of ten."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * num_bytes / min(times)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """How long the work takes, waited for."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Row:
    """One line of the table."""

    model: str
    contender: str
    batch: int
    tokens_per_second: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


class Bench:
    """One model's contenders, in turn."""

    def __init__(self, name: str, device: torch.device, directory: Path, args: argparse.Namespace) -> None:
        self.name, self.device, self.args = name, device, args
        self.shape = shape = SHAPES[name]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.reference = make_model(directory, shape, dtype, device)
        self.weight_bytes = sum(
            parameter.nbytes
            for parameter_name, parameter in self.reference.named_parameters()
            if "embed_tokens" not in parameter_name
        )
        generator = torch.Generator().manual_seed(1)
        most = max(shape.batch_sizes)
        self.prompts = torch.randint(0, 400, (most, shape.prompt_len), generator=generator).tolist()
        self.params = SamplingParams(temperature=0, max_tokens=shape.output_len, ignore_eos=True, detokenize=False)
        self.settings = {
            "model": str(directory),
            "device": str(device),
            "max_model_len": shape.prompt_len + shape.output_len,
            "max_num_seqs": most,
        }
        self.plain = LLM(**self.settings)
        options = {"proposer_config": {"acceptance": args.acceptance}, "num_speculative_tokens": args.k}
        method = f"{Successors.__module__}:{Successors.__name__}"
        self.speculative = LLM(**self.settings, speculative_config={"method": method, **options})

    def generate(self, llm: LLM, batch: int) -> None:
        prompts = [{"prompt_token_ids": prompt} for prompt in self.prompts[:batch]]
        for prompt, output in zip(self.prompts, llm.generate(prompts, self.params), strict=False):
            expected = range(prompt[-1] + 1, prompt[-1] + 1 + self.shape.output_len)
            assert list(output.outputs[0].token_ids) == list(expected), "a token is not followed by its successor"

    def transformers(self, batch: int) -> None:
        ids = torch.tensor(self.prompts[:batch], device=self.device)
        with torch.inference_mode():
            self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.shape.output_len,
                do_sample=False,
            )

    def run(self, deadline: float) -> list[Row]:
        """Tokens per second of each contender at each batch size."""
        contenders: dict[str, Callable[[int], Any]] = {
            "plain": lambda batch: self.generate(self.plain, batch),
            "speculative": lambda batch: self.generate(self.speculative, batch),
            "transformers": self.transformers,
        }
        rows = []
        for batch in self.shape.batch_sizes:
            found = {name: Row(self.name, name, batch, []) for name in contenders}
            for work in contenders.values():
                work(batch)
            for index in range(self.args.rounds):
                if index and time.perf_counter() > deadline:
                    break
                for name, work in contenders.items():
                    taken = seconds(partial(work, batch), self.device)
                    found[name].tokens_per_second.append(batch * self.shape.output_len / taken)
            rows += found.values()
        return rows

    def overhead(self) -> float:
        """Median microseconds of a decoding step at batch 1 beyond the forward pass."""
        runner = parts_of(self.plain).runner
        target = runner._target
        runner._target = timed = TimedTarget(target, self.device)
        self.plain.engine.add_request({"prompt_token_ids": self.prompts[0]}, self.params)
        beyond = []
        while self.plain.engine.has_unfinished_requests:
            taken = seconds(self.plain.engine.step, self.device)
            beyond.append(taken - timed.last_seconds())
        runner._target = target
        return 1e6 * statistics.median(beyond[1:])


class TimedTarget:
    """A target whose forward passes are timed where they run."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self._target = target
        on_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
        self._seconds = 0.0

    def forward(self, batch: Batch) -> TargetOutput:
        if self._events:
            self._events[0].record()
        started = time.perf_counter()
        output = self._target.forward(batch)
        self._seconds = time.perf_counter() - started
        if self._events:
            self._events[1].record()
        return output

    def last_seconds(self) -> float:
        """Of the last pass, once the device has finished it."""
        return self._events[0].elapsed_time(self._events[1]) / 1e3 if self._events else self._seconds


def table(result: dict[str, Any]) -> str:
    """The one table: speeds, and how they compare with the floor, with transformers and with the goals."""
    lines = [f"{'model':8}{'batch':>6}  {'contender':14}{'tokens/s':>10}{'of the floor':>14}{'of transformers':>17}"]
    for model in result["models"].values():
        rows = model["rows"]
        theirs = {row["batch"]: row["median"] for row in rows if row["contender"] == "transformers"}
        for row in rows:
            share = f"{row['median'] / model['floor_tokens_per_second']:14.2f}" if row["batch"] == 1 else " " * 14
            ratio = f"{row['median'] / theirs[row['batch']]:17.2f}"
            lines.append(f"{row['model']:8}{row['batch']:6}  {row['contender']:14}{row['median']:10.1f}{share}{ratio}")
        overhead, length = model["step_overhead_us"], model["acceptance_length"]
        lines.append(f"{'':16}step overhead at batch 1: {overhead:.0f} us; acceptance length {length:.2f}")
    goals = ", ".join(f"{name} {goal:g}" for name, goal in GOALS.items())
    lines.append(f"copy bandwidth {result['copy_bandwidth'] / 1e9:.0f} GB/s; goals, plain at batch 1: {goals}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU: whether this script works")
    parser.add_argument("--models", nargs="+", choices=["1B", "8B"], default=["1B", "8B"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability that a draft token is left as it is")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    if args.smoke:
        args.models, args.rounds = ["smoke"], 2
    elif not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --smoke runs a tiny model on a CPU")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    started = time.perf_counter()
    device = torch.device("cpu" if args.smoke else "cuda")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bandwidth = copy_bandwidth(device, 2**20 if args.smoke else 2**32)
    models: dict[str, Any] = {}
    for index, name in enumerate(args.models):
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(name, device, Path(directory), args)
            deadline = started + WORST_SECONDS * (index + 1) / len(args.models)
            rows = bench.run(deadline)
            models[name] = {
                "config": SHAPES[name].config,
                "prompt_len": SHAPES[name].prompt_len,
                "output_len": SHAPES[name].output_len,
                "weight_bytes_per_step": bench.weight_bytes,
                "floor_tokens_per_second": bandwidth / bench.weight_bytes,
                "step_overhead_us": bench.overhead(),
                "acceptance_length": bench.speculative.engine.metrics.acceptance.mean_acceptance_length,
                "rows": [asdict(row) | {"median": row.median} for row in rows],
            }
            del bench
    result = {
        "copy_bandwidth": bandwidth,
        "k": args.k,
        "acceptance": args.acceptance,
        "dtype": "float32" if args.smoke else "bfloat16",
        "device": "cpu" if args.smoke else torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "python": sys.version.split()[0],
        "seconds": time.perf_counter() - started,
        "models": models,
    }
    print(table(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
