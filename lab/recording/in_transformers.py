"""Recording inside transformers: `model.generate` runs the target, and the taps see its steps through the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.adapters.transformers import SpeculativeDecoding, speculative
from specdec.core.model.model_support import locate_model
from specdec.core.registry import PluginSettings
from specdec.sdk import ConfigError

from ..dataset_files import PromptRow
from ..datasets import load_dataset, of_category, spread
from .foreign import target_manifest
from .manifest import Manifest, plain
from .recorder import TOKENIZER, Recorded, RecordProgress, RecordSettings
from .request import RecordedRequest
from .tap import TAP, ProbabilityTap
from .writer import RecordingWriter


def record_in_transformers(
    settings: RecordSettings, plugins: PluginSettings, folder: Path, progress: RecordProgress
) -> Recorded:
    """As `record`, of first turns. Raises ConfigError SD-E251 for sampling, whose draws depend on torch's generator."""
    if not settings.sampling.greedy:
        facts = {"found": f"temperature {settings.temperature}", "fix": "temperature 0, or record in specdec"}
        raise ConfigError("SD-E251", "inside transformers only greedy text is recorded", facts)
    rows = of_category(load_dataset(settings.dataset_name, settings.dataset_path, plugins), settings.category)
    rows = spread(rows, settings.num_prompts)
    progress.stage("loading")
    manifest, tokenizer = target_manifest(
        settings.engine,
        "transformers",
        f"{settings.dataset_name} {settings.dataset_path or ''}",
        settings.hidden_states,
    )
    model = _loaded(settings, manifest)
    ends = model.generation_config.eos_token_id
    manifest = manifest.replace(
        eos_token_ids=() if ends is None else tuple([ends] if isinstance(ends, int) else ends),
        sampling=plain(settings.sampling.model_dump(mode="json")),
        top_m=min(settings.top_m, int(manifest.target["vocab_size"])),
        full_logits=settings.full_logits,
    )
    writer = RecordingWriter(folder, manifest, max_disk=settings.max_disk)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / TOKENIZER)
    listener = ProbabilityTap(settings.top_m, settings.full_logits)
    tap = {"method": TAP, "proposer_config": {"hidden_states": settings.hidden_states}}
    progress.stage("recording", len(rows))
    decoding = speculative(model, tap, tokenizer=tokenizer, plugin_settings=plugins, listeners=[listener])
    with closing(decoding):
        for request, hidden, logits in _generated(settings, rows, writer, (model, tokenizer, decoding, listener)):
            writer.add(request, hidden, logits)
            progress.written(writer.num_bytes)
    return Recorded(writer.finish(), len(writer.done), writer.num_bytes)


def _loaded(settings: RecordSettings, manifest: Manifest) -> Any:
    path, trusts = locate_model(settings.engine.model), settings.engine.trust_remote_code
    dtype = getattr(torch, manifest.target["dtype"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trusts)
    return model.to(manifest.target["device"]).eval()


def _generated(
    settings: RecordSettings,
    rows: Sequence[PromptRow],
    writer: RecordingWriter,
    parts: tuple[Any, Any, SpeculativeDecoding, ProbabilityTap],
) -> Iterator[tuple[RecordedRequest, Tensor | None, Tensor | None]]:
    """Every prompt that fits and is not in the recording, one after the other."""
    model, tokenizer, decoding, listener = parts
    ends, limit = writer.manifest.eos_token_ids, int(writer.manifest.target["max_model_len"]) - settings.output_len
    calls = count()
    for number, row in enumerate(rows):
        ids = _encoded(tokenizer, row.prompt, chat=settings.chat)
        if row.prompt_id in writer.done or len(ids) > limit:
            continue
        name = str(next(calls))  # as the adapter numbers its calls
        listener.params[name] = settings.sampling
        prompt = torch.tensor([ids], device=model.device)
        more = {"max_new_tokens": settings.output_len, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        tokens = model.generate(prompt, custom_generate=decoding, **more)[0, len(ids) :].tolist()
        probabilities, logits = listener.take(name)
        request = RecordedRequest(
            request_id=row.prompt_id,
            number=number,
            prompt_id=row.prompt_id,
            turn=0,
            category=row.category,
            prompt=row.prompt,
            text=tokenizer.decode(tokens, skip_special_tokens=True),
            seed=settings.seed,
            prompt_token_ids=tuple(ids),
            token_ids=tuple(tokens),
            past_token_ids=(),
            finish_reason="stop" if tokens[-1] in ends else "length",
            **probabilities,
        )
        yield request, decoding.proposer.take(name), logits


def _encoded(tokenizer: Any, text: str, *, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(asked, add_special_tokens=False)["input_ids"])
