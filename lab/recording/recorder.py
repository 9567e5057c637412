"""Runs a target on a dataset and records it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from specdec.core.registry import PluginSettings
from specdec.sdk import ConfigError

from ..dataset_files import PromptRow
from ..datasets import spread
from ..progress import NoProgress
from .in_specdec import EngineSource
from .manifest import Cost, Manifest, plain
from .session import RecordingSession
from .settings import RecordSettings
from .shards import pyarrow
from .source import Source
from .writer import RecordingWriter, reserved


def record(
    settings: RecordSettings,
    plugins: PluginSettings,
    folder: Path,
    progress: NoProgress,
    inside: Callable[[RecordSettings, PluginSettings], Source] = EngineSource,
) -> RecordingWriter:
    """Record into a folder, or go on with what it holds of the same recording. Returns what has written it.

    inside: who generates. Raises SpecdecError: SD-E187, SD-E243, SD-E247 and SD-E248 of the folder, and what a source
    or a dataset raises.
    """
    pyarrow()  # before a target is loaded
    rows = spread(settings.rows(plugins), settings.num_prompts)
    progress.stage("loading")
    with reserved(folder), closing(inside(settings, plugins)) as source:
        if not source.takes_grammars:
            _refuse_forms(rows)
        writer = RecordingWriter(folder, _manifest(settings, source, rows), max_disk=settings.max_disk)
        if source.texts.tokenizer is not None:
            writer.save_tokenizer(source.texts.tokenizer)
        _record(settings, source, rows, writer, progress)
        return writer


def _refuse_forms(rows: Sequence[PromptRow]) -> None:
    """Raise ConfigError SD-E162 where a prompt asks for a form."""
    asks = next((row.prompt_id for row in rows if row.structured_outputs is not None), None)
    if asks is not None:
        facts = {"fix": "a dataset without structured_outputs, or --engine specdec or vllm"}
        raise ConfigError("SD-E162", f"prompt {asks!r} asks for structured output, which is not recorded there", facts)


def _record(
    settings: RecordSettings,
    source: Source,
    rows: Sequence[PromptRow],
    writer: RecordingWriter,
    progress: NoProgress,
) -> None:
    session = RecordingSession(source, writer, settings.sampling, chat=settings.chat)
    progress.stage("recording", sum(len(row.turns) for row in rows))
    try:
        for ended in session.run(rows):
            progress.finished(ended.metrics)
            progress.written(writer.num_bytes)
    finally:  # where a request fails or the run is interrupted, too
        writer.flush()
    cost = writer.manifest.cost
    if settings.measure_cost and source.measures_cost and not cost.rows and session.prompts:
        progress.stage("measuring steps")
        cost = source.measure_cost(session.prompts)
    writer.finish(cost=Cost(**dict(cost)), environment=source.environment())
    progress.written(writer.num_bytes)


def _manifest(settings: RecordSettings, source: Source, rows: Sequence[PromptRow]) -> Manifest:
    as_given = settings.model_dump(mode="json", include={"dataset_name", "dataset_path", "category", "chat"})
    return source.manifest.replace(
        sampling=plain(settings.sampling.model_dump(mode="json")),
        dataset=as_given | {"prompts_sha256": _sha256(rows), "num_prompts": len(rows)},
        top_m=min(settings.top_m, int(source.manifest.target["vocab_size"])),
        hidden_states=settings.hidden_states,
        full_logits=settings.full_logits,
    )


def _sha256(rows: Sequence[PromptRow]) -> str:
    """Hash of the prompts, in the order in which they run."""
    texts = json.dumps([asdict(row) for row in rows], default=lambda form: form.model_dump(mode="json"))
    return hashlib.sha256(texts.encode()).hexdigest()
