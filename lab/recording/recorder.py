"""Runs a target on a dataset and records it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine
from specdec.core.host import EngineView
from specdec.core.registry import PluginSettings
from specdec.core.request.request import Request
from specdec.sdk import StrictModel
from specdec.sdk.ranges import Limit, LimitOrZero, PositiveShare, Share, Temperature

from ..dataset_files import PromptRow
from ..datasets import load_dataset, of_category, spread
from ..environment import environment
from . import fingerprint
from .cost import measure_cost
from .manifest import Cost, Manifest, plain
from .session import RecordingSession
from .tap import MOST_DRAFTS, TAP, ProbabilityTap, RecordingTap
from .writer import RecordingWriter

TOKENIZER = "tokenizer"


class RecordSettings(StrictModel):
    """What to record, and how much of it. Names as in `BenchSettings`."""

    engine: EngineConfig
    dataset_name: str = "packaged"
    dataset_path: Path | None = None
    category: str | None = Field(None, description="None: all")
    num_prompts: LimitOrZero = Field(0, description="taken in turn from each category; 0: all")
    chat: bool = Field(False, description="put each prompt into the model's chat template")
    output_len: Limit = 128
    temperature: Temperature = 0.0
    top_k: LimitOrZero = Field(0, description="0: off")
    top_p: PositiveShare = 1.0
    min_p: Share = 0.0
    seed: int = Field(0, ge=0, lt=2**62, description="of the first request; each next one has one more")
    top_m: Limit = Field(20, description="likeliest tokens whose probability is kept at each position")
    hidden_states: tuple[int | Literal["final"], ...] = Field((), description="layers, as in Needs.hidden_states")
    full_logits: bool = False
    max_disk: Limit | None = Field(None, description="bytes; None: no limit")
    measure_cost: bool = True

    @property
    def sampling(self) -> SamplingParams:
        """Of the first request."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.output_len,
            detokenize=False,
        )


class RecordProgress(Protocol):
    """Who is told how far a recording is."""

    def stage(self, name: str, num_requests: int = 0) -> None:
        """Something begins that will finish this many requests; 0: not counted."""
        ...

    def finished(self, request: Request) -> None:
        """One request of the stage ended."""
        ...

    def written(self, num_bytes: int) -> None:
        """The recording takes so much of the disk."""
        ...


@dataclass(frozen=True)
class Recorded:
    """What a recording has become."""

    manifest: Manifest
    num_requests: int
    num_bytes: int


def record(settings: RecordSettings, plugins: PluginSettings, folder: Path, progress: RecordProgress) -> Recorded:
    """Record into a folder, or go on with what it holds of the same recording.

    Raises SpecdecError: SD-E243, SD-E247 and SD-E248 of the folder, and what an engine or a dataset raises.
    """
    rows = of_category(load_dataset(settings.dataset_name, settings.dataset_path, plugins), settings.category)
    rows = spread(rows, settings.num_prompts)
    progress.stage("loading")
    tap = {"method": TAP, "num_speculative_tokens": MOST_DRAFTS}
    tap["proposer_config"] = {"hidden_states": settings.hidden_states}
    config = settings.engine.replace(enable_profiling=True)
    with closing(Engine(config, tap, plugins)) as engine:
        writer = RecordingWriter(folder, _manifest(settings, engine, rows), max_disk=settings.max_disk)
        if engine.tokenizer is not None:
            engine.tokenizer.save_pretrained(folder / TOKENIZER)
        return _recorded(settings, engine, rows, writer, progress)


def _recorded(
    settings: RecordSettings,
    engine: Engine,
    rows: Sequence[PromptRow],
    writer: RecordingWriter,
    progress: RecordProgress,
) -> Recorded:
    listener = ProbabilityTap(settings.top_m, settings.full_logits)
    view = EngineView.of(engine)
    view.hooks.add(listener, "record")
    assert view.host is not None, "the tap is a proposer"
    tap = view.host.proposer
    assert isinstance(tap, RecordingTap)
    session = RecordingSession(engine, tap, listener, writer, settings.sampling, chat=settings.chat)
    progress.stage("recording", sum(len(row.turns) for row in rows))
    try:
        for request in session.run(rows):
            progress.finished(request)
            progress.written(writer.num_bytes)
    except KeyboardInterrupt:
        writer.flush()
        raise
    writer.flush()
    cost = writer.manifest.cost
    if settings.measure_cost and not cost.rows and session.prompts:
        progress.stage("measuring steps")
        cost = measure_cost(engine, tap, session.prompts)
    machine = environment(view.device) | {"threads": view.num_threads}
    manifest = writer.finish(cost=Cost(**dict(cost)), environment=machine)
    progress.written(writer.num_bytes)
    return Recorded(manifest, len(writer.done), writer.num_bytes)


def _manifest(settings: RecordSettings, engine: Engine, rows: Sequence[PromptRow]) -> Manifest:
    view = EngineView.of(engine)
    info = view.info
    as_given = settings.model_dump(mode="json", include={"dataset_name", "dataset_path", "category", "chat"})
    blocks = {"num_kv_blocks": view.num_kv_blocks, "max_model_len": info.max_model_len}
    return Manifest(
        model=str(settings.engine.model),
        model_fingerprint=fingerprint.of_model(info.checkpoint_dir, info.config),
        tokenizer_fingerprint=fingerprint.of_tokenizer(engine.tokenizer),
        target=plain(asdict(info) | {"config": dict(info.config)}),
        engine=plain(settings.engine.model_dump(mode="json") | blocks | {"device": info.device}),
        eos_token_ids=tuple(sorted(view.eos_token_ids)),
        sampling=plain(settings.sampling.model_dump(mode="json")),
        dataset=as_given | {"prompts_sha256": _sha256(rows), "num_prompts": len(rows)},
        top_m=min(settings.top_m, info.vocab_size),
        hidden_states=settings.hidden_states,
        full_logits=settings.full_logits,
    )


def _sha256(rows: Sequence[PromptRow]) -> str:
    """Hash of the prompts, in the order in which they run."""
    return hashlib.sha256(json.dumps([asdict(row) for row in rows]).encode()).hexdigest()
