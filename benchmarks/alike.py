"""Comparisons of proposers that are alike, and of some that differ by 5 %: what intervals on a recording say.

    python -m benchmarks.alike [--comparisons 10] [--busy 0]

Each comparison has identical n-gram proposers. An interval of their difference should hold 0 in 19 of 20. Then a
proposer that costs 5 % more is compared with it, with the prompts and repeats that a first comparison proposes. --busy
runs that many other programs, each of which wants a processor.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings
from specdec.lab.comparison import run_compare_recorded, variants
from specdec.lab.environment import load_per_core
from specdec.lab.progress import NoProgress
from specdec.lab.recording.recorder import record
from specdec.lab.recording.settings import RecordSettings
from specdec.plugins.ngram import NgramProposer

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SPIN = "while True: pass"
SHARE = 0.05


class Slower(NgramProposer):
    """The n-gram proposer, which counts up to a number before each draft."""

    class Options(NgramProposer.Options):
        """Also how far it counts."""

        count: int = 0

    def propose(self, step):
        """Draft as it does."""
        for _ in range(self._options.count):
            pass
        return super().propose(step)


@contextmanager
def others(count):
    """Programs that take all they get."""
    started = [Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.terminate()
            each.wait()


def recorded(folder, num_prompts, output_len):
    """A recording of the packaged prompts."""
    engine = EngineConfig(model="tiny", device="cpu", max_num_seqs=1)
    settings = RecordSettings(engine=engine, num_prompts=num_prompts, output_len=output_len)
    record(settings, PluginSettings(), folder, NoProgress())
    return folder


def compared(folder, asked, repeat):
    """The result of one comparison."""
    return run_compare_recorded(folder, variants(asked, []), PluginSettings(), NoProgress(), None, repeat=repeat)


def alike(folder, count, num_proposers, repeat):
    """How often every interval of a comparison holds 0. Prints a row for each."""
    held = 0
    for number in range(count):
        result = compared(folder, [NGRAM] * num_proposers, repeat)
        rows, machine = result["rows"][1:], result["machine"]
        inside = all(low <= 0 <= high for low, high in (row["difference_to_best_interval"] for row in rows))
        held += inside
        last, (low, high) = rows[-1]["difference_to_best"], rows[-1]["difference_to_best_interval"]
        print(
            f"{number + 1:3} {num_proposers:3} {machine['load_per_core']:6.1f} {machine['waited_share']:7.0%} "
            f"{result['rows'][0]['speedup']:6.3f} {last:+8.4f} ({low:+.4f} to {high:+.4f}) {'yes' if inside else 'NO'}",
            flush=True,
        )
    return held


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=10)
    parser.add_argument("--proposers", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(TemporaryDirectory()))
        folder = recorded(temporary / "x", args.num_prompts, args.output_len)
        stack.enter_context(others(args.busy))
        print(f"{args.busy} other programs, load for each core {load_per_core():.1f}")
        print(f"{'#':>3} {'of':>3} {'load':>6} {'waited':>7} {'best':>6} the last one's difference; 0 is inside")
        held = alike(folder, args.comparisons, args.proposers, args.repeat)
        print(f"0 is inside in {held} of {args.comparisons}")
        different(folder, args.repeat, args.output_len, temporary)


def different(folder, repeat, output_len, temporary):
    """A proposer that costs 5 % more, found by counting further."""
    slower = {"method": "benchmarks.alike:Slower", "num_speculative_tokens": 4}

    def asked(count):
        return [NGRAM, slower | {"proposer_config": {"count": count}}]

    count = 20_000
    for _ in range(3):
        pilot = compared(folder, asked(count), repeat)
        speed = {"Slower" in row["label"]: row["speedup"] for row in pilot["rows"]}
        count = round(count * min(SHARE / max(1 - speed[True] / speed[False], SHARE / 10), 10))
    needed = pilot["rows"][1]["to_tell_apart"]
    print(f"to tell {SHARE:.0%} apart: {needed}")
    if needed:
        larger = recorded(temporary / "y", needed["num_prompts"], output_len)
        result = compared(larger, asked(count), needed["repeat"])
        best, other = result["rows"]
        low, high = other["difference_to_best_interval"]
        share = other["difference_to_best"] / best["speedup"]
        print(
            f"with {len(best['requests'])} prompts: {other['label']} {share:+.1%}, {low:+.4f} to {high:+.4f}, "
            f"told apart: {'yes' if high < 0 else 'NO'}"
        )


if __name__ == "__main__":
    main()
