"""What a step costs as the batch, the context and the number of drafts grow, beside the trend that it should follow.

    python -m benchmarks.scaling --save benchmarks/results/scaling.json --plot benchmarks/results/scaling.svg

A Llama of the width of the 0.1 B model (768, vocabulary 32,000) with two layers, fp32 on a CPU, greedy; medians over
the steps of what the engine's own profile says of each stage. Drafts are synthetic and cost nothing, except along the
context, where they are looked up in the text. "schedule" includes the batch and the drafts that are taken from the
store, "propose" their storage.

A trend is fitted to all points of a line: constant (the median) or linear (least squares of the relative error).
`off` is the largest relative distance of a point from it, `growth` the last point over the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from specdec import LLM, SamplingParams
from specdec.lab.environment import environment

from .peers.report import Sheet
from .peers.targets import VOCABULARY, circling_llama

RESULT = Path(__file__).parent / "results" / "scaling.json"
NUM_LAYERS = 2
LONGEST = 32768
NUM_WARM_STEPS = 3


class Line(NamedTuple):
    """One line of the plot: a stage of the step along an axis."""

    axis: str  # "batch", "context" or "drafts"
    proposer: str  # "synthetic", "ngram" or "suffix"
    stage: str
    trend: str  # "constant" or "linear"


LINES = (
    *(Line("batch", "synthetic", stage, "linear") for stage in ("schedule", "forward", "verify", "commit", "propose")),
    Line("context", "ngram", "forward", "linear"),
    *(Line("context", proposer, "propose", "constant") for proposer in ("ngram", "suffix")),
    *(Line("drafts", "synthetic", stage, "linear") for stage in ("forward", "verify", "propose")),
)


class Shape(NamedTuple):
    """What one measurement runs."""

    proposer: str
    batch: int = 1
    context: int = 128
    drafts: int = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    shapes = {
        "batch": [Shape("synthetic", batch=value) for value in args.batch],
        "context": [Shape(name, context=value) for name in ("ngram", "suffix") for value in args.context],
        "drafts": [Shape("synthetic", drafts=value) for value in args.drafts],
    }
    with TemporaryDirectory() as folder:
        model = circling_llama(NUM_LAYERS)
        model.config.max_position_embeddings = LONGEST + 1024
        model.save_pretrained(folder)
        del model
        stages = {axis: [(shape, step_stages(folder, shape, args.steps)) for shape in shapes[axis]] for axis in shapes}
    result = {
        "model": {"hidden_size": 768, "num_layers": NUM_LAYERS, "vocab_size": VOCABULARY, "dtype": "float32"},
        "steps": args.steps,
        "environment": environment(torch.device("cpu")),
        "lines": [described(line, stages[line.axis]) for line in LINES],
    }
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(sheet(result).markdown())
    if args.plot:
        plot(result, args.plot)


def step_stages(model: str, shape: Shape, num_steps: int) -> dict[str, float]:
    """Median milliseconds of each stage of a decoding step, drafts verified in it and made in it."""
    config = {"method": shape.proposer}
    if shape.proposer == "synthetic":
        config = {"method": "benchmarks.peers.successors:Successors", "proposer_config": {"acceptance": 0.8}}
    num_tokens = (num_steps + NUM_WARM_STEPS + 1) * (shape.drafts + 1)
    with LLM(
        model,
        dtype="float32",
        speculative_config=config | {"num_speculative_tokens": shape.drafts},
        max_model_len=shape.context + num_tokens,
        max_num_seqs=shape.batch,
        enable_profiling=True,
    ) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        generator = torch.Generator().manual_seed(2)
        for prompt in torch.randint(32, VOCABULARY, (shape.batch, shape.context), generator=generator).tolist():
            engine.add_request({"prompt_token_ids": prompt}, params)
        while min(len(engine.get_request(str(index)).output_token_ids) for index in range(shape.batch)) == 0:
            engine.step()
        steps = []
        for _ in range(NUM_WARM_STEPS + num_steps):
            before = engine.metrics.seconds.copy()
            engine.step()
            steps.append({stage: total - before[stage] for stage, total in engine.metrics.seconds.items()})
    return {stage: 1e3 * median(step[stage] for step in steps[NUM_WARM_STEPS:]) for stage in steps[-1]}


def described(line: Line, measured: Sequence[tuple[Shape, dict[str, float]]]) -> dict[str, Any]:
    """A line's points, its trend, and how well they agree."""
    points = [
        (getattr(shape, line.axis), stages[line.stage]) for shape, stages in measured if shape[0] == line.proposer
    ]
    sizes, found = ([float(value) for value in column] for column in zip(*points, strict=True))
    fixed, each = fitted(line.trend, sizes, found)
    expected = [fixed + each * size for size in sizes]
    return line._asdict() | {
        "sizes": sizes,
        "ms": found,
        "fixed_ms": fixed,
        "ms_per_unit": each,
        "off": max(abs(ms / trend - 1) for ms, trend in zip(found, expected, strict=True)),
        "growth": found[-1] / found[0],
    }


def fitted(trend: str, sizes: Sequence[float], ms: Sequence[float]) -> tuple[float, float]:
    """What is paid once, and per unit of size."""
    if trend == "constant" or len(sizes) < 2:
        return median(ms), 0.0
    weight = 1 / torch.tensor(ms, dtype=torch.float64)
    rows = torch.stack([torch.ones(len(sizes), dtype=torch.float64), torch.tensor(sizes, dtype=torch.float64)], dim=1)
    solution = torch.linalg.lstsq(rows * weight[:, None], torch.ones(len(sizes), 1, dtype=torch.float64)).solution
    fixed, each = solution[:, 0].tolist()
    return fixed, each


def sheet(result: dict[str, Any]) -> Sheet:
    """One row per line: first and last point, the trend, and how far it is off."""
    rows = [
        [
            line["axis"],
            f"{line['sizes'][0]:g} to {line['sizes'][-1]:g}",
            line["proposer"],
            line["stage"],
            f"{line['ms'][0]:.3f} to {line['ms'][-1]:.3f}",
            f"{line['fixed_ms']:.3f}" + (f" + {line['ms_per_unit']:.4f} each" if line["trend"] == "linear" else ""),
            f"{line['off']:.0%}",
        ]
        for line in result["lines"]
    ]
    head = ["axis", "from, to", "drafts", "stage", "ms", "trend, ms: fixed + per unit", "off by at most"]
    return Sheet("Cost of a step", head, rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """A panel per axis, measured points and the trend that they should follow."""
    from matplotlib import pyplot

    axes = list(dict.fromkeys(line["axis"] for line in result["lines"]))
    figure, panels = pyplot.subplots(1, len(axes), figsize=(5 * len(axes), 4), layout="constrained")
    for axis, panel in zip(axes, panels, strict=True):
        for line in (line for line in result["lines"] if line["axis"] == axis):
            trend = [line["fixed_ms"] + line["ms_per_unit"] * size for size in line["sizes"]]
            label = f"{line['stage']}, {line['proposer']}: {line['trend']}"
            (drawn,) = panel.loglog(line["sizes"], line["ms"], "o", label=label)
            panel.loglog(line["sizes"], trend, "--", color=drawn.get_color())
        panel.set(xlabel={"batch": "requests", "context": "tokens", "drafts": "drafts per step"}[axis], ylabel="ms")
        panel.set_xscale("log", base=2)
        panel.legend(fontsize="x-small")
    figure.savefig(path)


if __name__ == "__main__":
    main()
