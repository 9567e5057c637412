"""The command that starts vLLM with the same target and proposer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from specdec.core.host import registry
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import ConfigError

from ..foreign.vllm_class import VllmClass
from ..foreign.vllm_keys import vllm_keys
from .asked import Asked, HandOver, Route
from .vllm_methods import COMMON, NATIVE, REASONS, VERSIONS, NativeMethod

_ADAPTER = "specdec.adapters.vllm"
_RUNNERS = (
    "runs in vLLM 0.32's V2 model runner where Triton runs, and in V1 elsewhere or with VLLM_USE_V2_MODEL_RUNNER=0",
    "a drafter with KV of its own needs --no-enable-prefix-caching in V1",
    "install specdec-sdk, the plugin and its checkpoint on every machine",
)


def hand_over(asked: Asked) -> HandOver:
    """vLLM's own drafter where it has the method, a class written for vLLM as it is, and else the adapter."""
    native = NATIVE.get(asked.plugin.name) if asked.plugin.distribution == registry.SDK_DISTRIBUTION else None
    if native is not None:
        return _native(asked, native)
    return _own_class(asked) if issubclass(asked.resolved.cls, VllmClass) else _adapter(asked)


def _native(asked: Asked, method: NativeMethod) -> HandOver:
    checkpoint = {} if asked.resolved.model is None else {"model": asked.resolved.model}
    taken = method.options | vllm_keys().keys()
    options = {key: value for key, value in asked.options.items() if key in taken}
    no_option = f"vLLM's {asked.plugin.name} has no such option"
    dropped = {key: no_option for key in asked.options if key not in taken}
    dropped |= {key: reason for key, reason in REASONS.items() if key in asked.written}
    drafter = {"method": asked.plugin.name, **_common(asked), **checkpoint, **_of_checkpoint(asked), **options}
    return _answer(asked, "native", drafter, {}, dropped, (*method.notes, f"written for vLLM {VERSIONS}"))


def _of_checkpoint(asked: Asked) -> Mapping[str, object]:
    """The settings that vLLM takes for a drafter that makes all its drafts in one pass."""
    if asked.resolved.model is None:
        return {}
    kind = Checkpoint.open(asked.resolved.model).config.get("speculators_model_type")
    return {"parallel_drafting": True} if kind == "peagle" else {}


def _own_class(asked: Asked) -> HandOver:
    foreign = asked.resolved.cls.foreign
    path = f"{foreign.__module__}.{foreign.__qualname__}"
    dropped = {key: reason for key, reason in REASONS.items() if key in asked.written}
    return _answer(asked, "native", {"model": path, **_vllms(asked)}, asked.options, dropped)


def _adapter(asked: Asked) -> HandOver:
    method = asked.plugin.name if asked.config.method in (None, registry.CLASS_PATH_METHOD) else asked.config.method
    short = method.isidentifier()
    ours = {key: value for key, value in asked.written.items() if key not in COMMON | {"method", "model"}}
    section: dict[str, object] = {} if short else {"method": method}
    section |= {} if asked.resolved.model is None else {"model": asked.resolved.model}
    section |= ours | dict(asked.config.unclaimed)
    selector = f"{_ADAPTER}.{method if short else 'Configured'}"
    additional = {"specdec": section} if section else {}
    return _answer(asked, "adapter", {"model": selector, **_vllms(asked)}, additional, notes=_RUNNERS)


def _vllms(asked: Asked) -> dict[str, object]:
    """The keys that vLLM reads beside a class. Raises ConfigError SD-E133 without a draft length."""
    if asked.config.num_speculative_tokens is None:
        facts = {"why": "vLLM asks it of a class", "fix": 'add "num_speculative_tokens": 4'}
        raise ConfigError("SD-E133", "speculative_config has no num_speculative_tokens", facts, plugin=asked.plugin)
    return _common(asked)


def _common(asked: Asked) -> dict[str, object]:
    return {key: value for key, value in asked.written.items() if key in COMMON and value is not None}


def _answer(
    asked: Asked,
    route: Route,
    drafter: Mapping[str, object],
    additional: Mapping[str, object],
    dropped: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> HandOver:
    command = ["vllm", "serve", asked.model, "--speculative-config", json.dumps(drafter)]
    settings: dict[str, object] = {"speculative_config": dict(drafter)}
    if additional:
        command += ["--additional-config", json.dumps(additional)]
        settings["additional_config"] = dict(additional)
    if asked.config.trust_remote_code and route == "native":
        command.append("--trust-remote-code")
    return HandOver(
        engine="vllm",
        route=route,
        text=shlex.join(command),
        settings=settings,
        dropped=dropped or {},
        notes=notes,
    )
