"""Replays against live runs of the packaged target: how much faster, and how good the prediction is.

    python -m benchmarks.replay [--repeats 5]

Records the packaged prompts. In each repeat it measures the cost of a step, replays each proposer and runs it live, in
turn; it prints medians over the repeats. Token readers are also replayed on a recording of the same texts whose target
is said to have the sizes of a 70B model.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.engine import Engine
from specdec.core.host import parts_of
from specdec.core.registry import PluginSettings
from specdec.lab.progress import NoProgress
from specdec.lab.recording import Recording
from specdec.lab.recording.cost import measure_cost
from specdec.lab.recording.recorder import record
from specdec.lab.recording.settings import RecordSettings
from specdec.lab.recording.tap import MOST_DRAFTS, TAP
from specdec.lab.recording.writer import RecordingWriter
from specdec.lab.replay.run import params_of, replay

PROPOSERS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft_model": {"method": "draft_model", "model": "tiny/draft", "num_speculative_tokens": 4},
    "eagle3": {"model": "tiny/eagle3", "num_speculative_tokens": 4},
    "dflash": {"model": "tiny/dflash"},
}
TOKEN_READERS = ("ngram", "suffix")
SETTINGS = EngineConfig(model="tiny", device="cpu", max_num_seqs=1)


SIZES_OF_70B = {
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "num_layers": 80,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "checkpoint_dir": None,
}


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


def with_cost_of_now(recording):
    """The recording with the cost of a step as it is now, so that figures of one repeat belong together."""
    settings, asked = SETTINGS.replace(enable_profiling=True), {"method": TAP, "num_speculative_tokens": MOST_DRAFTS}
    with closing(Engine(settings, asked)) as engine:
        prompts = [request.prompt_token_ids for request in recording]
        cost = measure_cost(engine, parts_of(engine).host.proposer, prompts)
    return replace(recording, manifest=recording.manifest.replace(cost=cost))


def enlarged(recording, folder, sizes=SIZES_OF_70B):
    """The same texts, with random hidden states, as if a target of other sizes had said them."""
    manifest = recording.manifest
    target = manifest.target | sizes
    manifest = manifest.replace(model="70b", model_fingerprint=None, target=target, hidden_states=("final",))
    writer = RecordingWriter(folder, manifest)
    for request in recording:
        length = len(request.prompt_token_ids) + len(request.token_ids)
        writer.add(request, hidden=torch.randn(length, sizes["hidden_size"]).to(torch.bfloat16))
    writer.finish()
    return Recording.open(folder)


def main():
    """Print one row for each proposer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        settings = RecordSettings(engine=SETTINGS, num_prompts=6, output_len=96, hidden_states=(2, 4, 5, "final"))
        record(settings, PluginSettings(), Path(folder) / "x", NoProgress())
        recording = Recording.open(Path(folder) / "x")
        large = enlarged(recording, Path(folder) / "large")
        rows, against_large = {name: [] for name in PROPOSERS}, {name: [] for name in TOKEN_READERS}
        for _ in range(args.repeats):
            recording = with_cost_of_now(recording)
            plain, plainly = live_seconds(recording, None), replay(recording, None).predicted_seconds(recording)
            for name, asked in PROPOSERS.items():
                replayed = replay(recording, asked)
                live = live_seconds(recording, asked)
                predicted = replayed.predicted_seconds(recording)
                rows[name].append((live / replayed.seconds, plain / live, plainly / predicted))
                if name in TOKEN_READERS:
                    against_large[name].append(replay(large, asked).seconds / replayed.seconds)
    print("proposer     live/replay  speed-up live  predicted  ratio")
    for name, found in rows.items():
        faster, measured, predicted = (median(column) for column in zip(*found, strict=True))
        print(f"{name:12} {faster:11.1f} {measured:14.2f} {predicted:10.2f} {predicted / measured:6.2f}")
    for name, ratios in against_large.items():
        print(
            f"{name}: a replay of a 70B target's recording takes {median(ratios):.2f} of the time of the packaged one's"
        )


if __name__ == "__main__":
    main()
