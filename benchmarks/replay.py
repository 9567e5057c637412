"""Replays against live runs of the packaged target: how much faster, and how good the prediction is.

    python -m benchmarks.replay [--repeats 5]

Records the packaged prompts, replays each proposer and runs it live, in turn, and prints medians.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.engine import Engine
from specdec.core.registry import PluginSettings
from specdec.lab.recording import Recording
from specdec.lab.recording.recorder import RecordSettings, record
from specdec.lab.recording.tap import TAP
from specdec.lab.replay.run import params_of, replay

PROPOSERS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft_model": {"method": "draft_model", "model": "tiny/draft", "num_speculative_tokens": 4},
    "eagle3": {"model": "tiny/eagle3", "num_speculative_tokens": 4},
    "dflash": {"model": "tiny/dflash"},
}
SETTINGS = EngineConfig(model="tiny", device="cpu", max_num_seqs=1)


class Quiet:
    """Nobody is told."""

    def stage(self, name, num_requests=0):
        """Ignored."""

    def finished(self, request):
        """Ignored."""

    def written(self, num_bytes):
        """Ignored."""


def live_seconds(recording, asked):
    """All recorded requests through the engine with its target."""
    with closing(Engine(SETTINGS, asked)) as engine:
        engine.add_request([1, 2, 3], request_id="warm-up")
        while engine.has_unfinished_requests:
            engine.step()
        start = time.perf_counter()
        for request in recording:
            params = params_of(recording, request)
            engine.add_request(list(request.prompt_token_ids), params, request.request_id)
        while engine.has_unfinished_requests:
            engine.step()
        return time.perf_counter() - start


def main():
    """Print one row for each proposer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        settings = RecordSettings(engine=SETTINGS, num_prompts=6, output_len=96, hidden_states=(2, 4, 5, "final"))
        record(settings, PluginSettings(), Path(folder) / "x", Quiet())
        recording = Recording.open(Path(folder) / "x")
        rows = {name: [] for name in PROPOSERS}
        for _ in range(args.repeats):
            plain, idle = live_seconds(recording, None), replay(recording, {"method": TAP})
            plainly = idle.predicted_seconds(recording) - idle.propose_seconds
            for name, asked in PROPOSERS.items():
                replayed = replay(recording, asked)
                live = live_seconds(recording, asked)
                predicted = replayed.predicted_seconds(recording, idle)
                rows[name].append((live / replayed.seconds, plain / live, plainly / predicted))
    print("proposer     live/replay  speed-up live  predicted  ratio")
    for name, found in rows.items():
        faster, measured, predicted = (median(column) for column in zip(*found, strict=True))
        print(f"{name:12} {faster:11.1f} {measured:14.2f} {predicted:10.2f} {predicted / measured:6.2f}")


if __name__ == "__main__":
    main()
