"""An engine around a recording: everything is the engine's own, except the target."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.assembly import Parts, put_together
from specdec.core.engine.device import device_of, profile_of
from specdec.core.engine.engine import Engine
from specdec.core.engine.loaded_model import LoadedModel
from specdec.core.engine.plan import Plan, PrefixCaching
from specdec.core.engine.threads import Threads
from specdec.core.model.model_support import locate_model, state_layers
from specdec.core.model.text_equality import TextEquality
from specdec.core.proposing.speculation import Speculation, SpeculativeSettings
from specdec.core.registry import LoadedProposer, PluginSettings
from specdec.core.registry.hooks import load_hooks
from specdec.core.request.request import Committed
from specdec.sdk import ConfigError, ProposerError, TargetInfo
from specdec.sdk.errors import Refusal
from specdec.sdk.extensions import TargetKV, TargetLayers, TargetTokens, Trees
from specdec.sdk.ranges import INT32_MAX

from ..recording import Recording
from ..recording.manifest import not_a_recording
from ..recording.writer import TOKENIZER
from .playback import Playback
from .stand_in import RecordedTarget, require_same_model

EQUALITY = TextEquality("bits", "the text is the recording's")


class ReplayEngine(Engine):
    """An engine whose target says what a recording says. It takes the requests of that recording only."""

    playback: Playback  # what stands in for the target

    def __init__(
        self,
        recording: Recording,
        speculative_config: SpeculativeSettings = None,
        plugin_settings: PluginSettings | None = None,
        *,
        model: str | Path | None = None,
        device: str = "cpu",
    ) -> None:
        """model: where the target's checkpoint lies, if a proposer asks for its embedding. None means where it was.

        Raises ConfigError: SD-E249 if the proposer needs what was not recorded, SD-E251 for a rule that a recording
        cannot answer, SD-E246 if `model` is another one.
        """
        self.recording = recording
        config = replay_config(recording, device)
        target = _target(recording)
        target = replace(target, checkpoint_dir=_directory(recording, target, model))
        super().__init__(config, speculative_config, plugin_settings, partial(self._assemble, target))

    def step(self) -> list[Committed]:
        """Run the engine's step. If the recording lacks what the proposer reads, its own error is raised."""
        try:
            return super().step()
        except ProposerError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    def _assemble(
        self, target: TargetInfo, config: EngineConfig, asked: SpeculativeSettings, settings: PluginSettings
    ) -> Parts:
        manifest, directory = self.recording.manifest, target.checkpoint_dir
        profile = profile_of(device_of(config.device), config.cpu_kernels)
        info = replace(target, device=str(profile.device))
        hooks = load_hooks(settings)
        chains = f"replays verify chains alone on {profile.device.type}", "a CPU"
        withheld = {} if profile.device.type == "cpu" else {Trees.id: chains}
        speculation = Speculation.prepare(asked, info, settings, hooks, withheld=withheld)
        if speculation is not None:
            _refuse(self.recording, speculation)
        dtype = getattr(torch, info.dtype)
        prefixes = _prefix_caching(config, info, speculation)
        path = str(directory or manifest.model)
        plan = Plan(config, profile, path, None, dtype, info, settings, hooks, speculation, prefixes)
        stand_in: Any = RecordedTarget(manifest, directory, dtype, profile.device)
        threads = Threads(config.num_threads, None)
        tokenizer = tokenizer_of(self.recording)
        model = LoadedModel(stand_in, tokenizer, frozenset(manifest.eos_token_ids), threads, EQUALITY)
        wanted = speculation.loaded.needs.hidden_states if speculation else ()
        self.playback = Playback(self.recording, wanted, profile.device)
        parts = put_together(plan, model, self.playback.on)
        if parts.host is not None:
            parts.host.keeps_pace = parts.host.saves_state = False
        return parts


def recorded_settings(recording: Recording, *more: str) -> dict[str, Any]:
    """The recorded engine's settings that decide what a step holds, and the others that are named."""
    wanted = {"max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "enable_prefix_caching", *more}
    wanted |= {"structured_outputs_backend", "seed"}
    recorded = {name: value for name, value in recording.manifest.engine.items() if name in wanted}
    return {"max_num_seqs": 1} | recorded


def replay_config(recording: Recording, device: str = "cpu") -> EngineConfig:
    """The recorded engine's settings, where they say anything about a replay."""
    values = {"block_size": 16} | recorded_settings(recording, "num_kv_blocks")
    values |= {"device": device, "cuda_graphs": False, "enable_profiling": True}
    config = EngineConfig(model=recording.manifest.model, **values)
    if config.num_kv_blocks is not None:
        return config
    longest = max((len(each.prompt_token_ids) + len(each.token_ids) for each in recording), default=1)
    return config.replace(num_kv_blocks=config.max_num_seqs * (longest // config.block_size + 8))


def _prefix_caching(config: EngineConfig, info: TargetInfo, speculation: Speculation | None) -> PrefixCaching:
    """Whether prefixes are shared as in a live engine. The recording engine shared none: it kept every state."""
    needs = speculation.loaded.needs if speculation else None
    return PrefixCaching.decide(config.enable_prefix_caching, len(state_layers(PreTrainedConfig(**info.config))), needs)


def _target(recording: Recording) -> TargetInfo:
    """Raises ConfigError: SD-E249 if the manifest says nothing of it, SD-E244 if it says nonsense."""
    target = recording.manifest.target
    if not target:
        facts = {"recorded by": recording.manifest.source, "fix": "import it with --model, which names the target"}
        raise ConfigError("SD-E249", "the recording does not say what its target is", facts)
    try:
        info = TypeAdapter(TargetInfo).validate_python(target)
    except ValidationError as error:
        wrong = [".".join(map(str, each["loc"])) for each in error.errors()]
    else:
        counts = {name: value for name, value in vars(info).items() if isinstance(value, int)}
        wrong = [name for name, value in counts.items() if not (name != "max_nodes") <= value <= INT32_MAX]
        wrong += [] if info.dtype in ("float64", "float32", "bfloat16", "float16") else ["dtype"]
    if wrong:
        raise not_a_recording(recording.folder, f"its manifest has no usable target: {', '.join(wrong)}")
    return info


def _directory(recording: Recording, target: TargetInfo, model: str | Path | None) -> Path | None:
    """Where the target's checkpoint lies; None if it is not on this machine."""
    if model is not None:
        named = Path(locate_model(model))
        require_same_model(recording.manifest, named)
        return named
    names: list[str | Path | None] = [target.checkpoint_dir, recording.manifest.model]
    for name in names:
        try:
            found = Path(locate_model(name)) if name else None
        except ConfigError:
            continue
        if found is not None and found.is_dir():
            return found
    return None


def tokenizer_of(recording: Recording) -> Any:
    """The tokenizer that lies in the recording, or None. Raises ConfigError SD-E244 if it cannot be read."""
    folder = recording.folder / TOKENIZER
    if not folder.is_dir():
        return None
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)  # whatever its class: code of its own is not run
    except Exception as error:  # whatever a damaged file makes the library raise
        because = f"the folder {TOKENIZER} is damaged: {error}"
        raise not_a_recording(recording.folder, because, "record again into another folder") from error


def _refuse_reading_of_target(loaded: LoadedProposer) -> None:
    """Raise ConfigError SD-E249 for a proposer that reads more of the target than texts and hidden states."""
    needs = loaded.needs
    read = {
        "the target's most likely tokens after its drafts": needs.extension(TargetTokens),
        "the target's keys and values": needs.extension(TargetKV),
        "layers of the target": needs.extension(TargetLayers),
    }
    wanted = [what for what, asked in read.items() if asked]
    if wanted:
        facts = {"needs": ", ".join(wanted), "fix": "measure it with `specdec bench` or `specdec compare` and a model"}
        raise ConfigError("SD-E249", "the proposer needs what recordings do not hold", facts, plugin=loaded.plugin)


def _refuse(recording: Recording, speculation: Speculation) -> None:
    """Raise ConfigError or Refusal for a proposer that asks for more than there is."""
    loaded, manifest = speculation.loaded, recording.manifest
    rule = speculation.config.rejection_sample_method
    if rule != "standard":
        facts = {
            "found": f'"rejection_sample_method": "{rule}"',
            "fix": "leave it out: replays verify by the standard rule",
        }
        raise ConfigError("SD-E251", "a recording cannot answer this rule", facts, plugin=loaded.plugin)
    if loaded.needs.extension(Trees) and loaded.config.draft_sample_method == "probabilistic":
        reason = "a recording does not tell how often drawn trees are accepted"
        raise Refusal(reason, '"draft_sample_method": "greedy"', plugin=loaded.plugin)
    _refuse_reading_of_target(loaded)
    missing = [each for each in loaded.needs.hidden_states if each not in manifest.hidden_states]
    if missing:
        wanted = ",".join(map(str, dict.fromkeys([*manifest.hidden_states, *loaded.needs.hidden_states])))
        facts = {
            "needs": f"hidden states {', '.join(map(str, loaded.needs.hidden_states))}",
            "recorded": ", ".join(map(str, manifest.hidden_states)) or "none",
            "fix": f"record again into another folder with --hidden-states {wanted}",
        }
        raise ConfigError(
            "SD-E249", "the proposer needs hidden states that were not recorded", facts, plugin=loaded.plugin
        )
