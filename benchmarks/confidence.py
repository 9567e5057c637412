"""What a verification sized by confidence gains over fixed numbers of drafts: tokens per second of CPU time, in turns.

    python benchmarks/confidence.py [--batch 32] [--method eagle3] [--fixed 1 2 3 4 5 7] [--turns 5] [--clock cpu]

One engine per setting lives in one process; settings take short turns in a random order. All work on the same requests
in the same order, and a turn ends after a number of tokens, so it meets the same texts under each setting. Each turn's
rate is divided by that of the others in the same turn. Requests follow each other, so the batch is always full, and
prompts are part of the time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from specdec import LLM, SamplingParams
from specdec.core.engine.assembly import parts_of

TINY = Path(__file__).parents[1] / "assets" / "tiny"
ADAPTIVE = "adaptive"


class Arm:
    """An engine under one setting, and the requests that keep it full."""

    def __init__(self, name: str, args: argparse.Namespace, prompts: list[str]) -> None:
        speculative = {"method": args.method, "num_speculative_tokens": args.most if name == ADAPTIVE else int(name)}
        if (TINY / args.method).is_dir():
            speculative["model"] = f"tiny/{args.method}"
        speculative["enable_adaptive_verification"] = name == ADAPTIVE
        self.engine = LLM(
            "tiny", speculative_config=speculative, max_num_seqs=args.batch, num_threads=1, max_model_len=512
        ).engine
        self.parts = parts_of(self)
        self._batch, self._prompts, self._numbers = args.batch, prompts, count()
        self._temperatures, self._lengths, self._goal = args.temperature, random.Random(0), 0

    def rate(self, num_tokens: int) -> float:
        """Tokens per second of CPU time, over the next `num_tokens` and those of the step that reaches them."""
        before, start = self._num_tokens, time.process_time()
        self._goal += num_tokens
        while self._num_tokens < self._goal:
            self._fill()
            self.engine.step()
        return (self._num_tokens - before) / (time.process_time() - start)

    @property
    def _num_tokens(self) -> int:
        return self.parts.metrics.acceptance.num_committed_tokens

    def _fill(self) -> None:
        scheduler = self.parts.scheduler
        for number in self._missing(len(scheduler.running) + len(scheduler.waiting)):
            params = SamplingParams(
                max_tokens=self._lengths.randint(60, 200),
                temperature=self._temperatures[number % len(self._temperatures)],
                ignore_eos=True,
                seed=number,
            )
            self.engine.add_request(self._prompts[number % len(self._prompts)], params)

    def _missing(self, present: int) -> Iterator[int]:
        return (next(self._numbers) for _ in range(self._batch - present))

    @property
    def told(self) -> dict[str, object]:
        """What its counters say."""
        acceptance, counts = self.parts.metrics.acceptance, self.parts.metrics.counts
        told: dict[str, object] = {
            "tokens_per_request_and_step": round(acceptance.tokens_per_target_step, 3),
            "verified_per_draft": round(acceptance.num_draft_tokens / max(acceptance.num_drafts, 1), 2),
            "acceptance_rate": round(acceptance.draft_acceptance_rate, 3),
        }
        budget = self.parts.runner.budget
        if budget is not None:
            told |= {
                "not_verified": counts["num_unverified_draft_tokens"],
                "depth": budget.depth,
                "stops_below": [round(each, 2) for each in budget.stop_rule.least] if budget.stop_rule else None,
                "calibration_error": [round(each, 4) for each in budget.calibration.errors],
            }
        return told


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--most", type=int, default=7, help="K of the adaptive setting")
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=30, help="of a turn, for each request of the batch")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="of the requests in turn")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu", help="what the engine measures costs by")
    args = parser.parse_args()
    if args.clock == "cpu":  # as the rates are: on a machine that has other work, the time of day says little of costs
        time.perf_counter = time.process_time
    prompts = [json.loads(line)["prompt"] for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    names = [*map(str, args.fixed), ADAPTIVE]
    arms = {name: Arm(name, args, prompts) for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for arm in arms.values():
        arm.rate(4 * args.tokens * args.batch)  # nobody is measured while it finds its feet
    for _ in range(args.turns):
        for name in order.sample(names, len(names)):
            rates[name].append(arms[name].rate(args.tokens * args.batch))
    middle = {name: statistics.median(each) for name, each in rates.items()}
    best = max(map(str, args.fixed), key=middle.__getitem__)
    ratios = {
        name: [mine / other for mine, other in zip(rates[ADAPTIVE], rates[name], strict=True)]
        for name in map(str, args.fixed)
    }
    quarters = {name: statistics.quantiles(each, n=4) for name, each in ratios.items()}
    result = {
        "batch": args.batch,
        "method": args.method,
        "temperature": args.temperature,
        "tokens_per_cpu_second": {name: round(each) for name, each in middle.items()},
        "best_fixed": best,
        "adaptive_to_fixed": {name: [round(each, 3) for each in of] for name, of in quarters.items()},
        "adaptive_to_best": round(quarters[best][1], 3),
        "settings": {name: arm.told for name, arm in arms.items()},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
