"""Load a class as a checked proposer: its options are validated, its needs are asked for, and it is constructed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from specdec.sdk.check import check_callable, check_class, check_extensions
from specdec.sdk.config import NetworkSettings, ProposerConfig, StrictModel, unknown_keys, wrong_values
from specdec.sdk.errors import CheckpointError, ConfigError, PluginId, PluginLoadError, Refusal
from specdec.sdk.extensions import KNOWN, Extension, Trees
from specdec.sdk.hooks import CheckedProposer
from specdec.sdk.needs import Needs
from specdec.sdk.proposer_protocol import Proposer
from specdec.sdk.request_options import read_request_options, request_options_model
from specdec.sdk.saved_state import as_path, find_state, has_state, require_state
from specdec.sdk.types import TargetInfo

from ..config.speculative_config import SpeculativeConfig
from .attribution import attributing
from .catalog import ResolvedProposer
from .hooks import HookPlugins

logger = logging.getLogger("specdec")


@dataclass(frozen=True)
class LoadedProposer(CheckedProposer):
    """A proposer that can be constructed and called; looked up once, so that nothing is probed in a step."""

    state_dir: Path | None = None  # what its shared state is loaded from at the start and saved to at the end
    request_options: type[StrictModel] | None = None  # the class's RequestOptions

    def read_request(self, extra_args: Mapping[str, Any] | None, request_id: str) -> BaseModel | None:
        """What a request tells the proposer. Raises RequestError SD-E270 for what the proposer does not take."""
        return read_request_options(self.request_options, extra_args or {}, request_id, self.plugin)


def load_proposer(resolved: ResolvedProposer, config: SpeculativeConfig, target: TargetInfo) -> LoadedProposer:
    """Check the class, validate its options and ask what it needs from `target`. Nothing is constructed.

    Raises PluginLoadError (SD-E110 .. SD-E120), ConfigError (SD-E131, SD-E132, SD-E135: options; SD-E133: no draft
    length; SD-E179, SD-E181: its saved state), or Refusal.
    """
    plugin, cls = resolved.plugin, resolved.cls
    methods = check_class(cls, plugin)
    request_options = request_options_model(cls, plugin)
    proposer_config = ProposerConfig(
        num_draft_tokens=config.num_speculative_tokens or 1,
        model=resolved.model,
        draft_sample_method=config.draft_sample_method,
        network=NetworkSettings(**{name: getattr(config, name) for name in NetworkSettings.model_fields}),
        options=_options(cls, config, resolved),
    )
    if config.num_speculative_tokens is None:
        k = _default_draft_tokens(cls, proposer_config, target, plugin)
        proposer_config = proposer_config.replace(num_draft_tokens=k)
    proposer_config = proposer_config.replace(max_nodes=config.max_nodes)
    needs = _needs(cls, proposer_config, target, plugin)
    _check_length(needs, proposer_config.num_draft_tokens, plugin)
    draws_trees = needs.extension(Trees) is not None
    if config.max_nodes is not None and not draws_trees:
        raise _no_trees(config.max_nodes, target, plugin)
    if config.max_nodes is None and draws_trees:  # which it says only now
        proposer_config = proposer_config.replace(max_nodes=proposer_config.num_draft_tokens)
    methods |= check_extensions(cls, needs, _offered(target), plugin)
    logger.info("proposer %s: class %s, K=%d", plugin, plugin.target, proposer_config.num_draft_tokens)
    state_dir = _state_dir(config, plugin, methods)
    loaded = LoadedProposer(plugin, cls, proposer_config, needs, methods, state_dir, request_options)
    if config.isolation is None:
        return loaded
    return _isolated(loaded, resolved.hooks, config.isolation, target)


def _isolated(loaded: LoadedProposer, hooks: HookPlugins, isolation: Any, info: TargetInfo) -> LoadedProposer:
    """The class that runs it apart from the engine in its place. It drafts chains."""
    plugin = loaded.plugin
    cls = hooks.relay.isolate_proposer(isolation=isolation, proposer=loaded)
    if cls is None:
        facts = {"found": repr(isolation), "fix": '"isolation": "process", and its plugin not blocked'}
        raise ConfigError("SD-E132", "nobody offers this isolation", facts, plugin=plugin)
    config = loaded.config.replace(max_nodes=None)
    needs = _needs(cls, config, info, plugin)
    methods = check_class(cls, plugin) | check_extensions(cls, needs, _offered(info), plugin)
    return replace(loaded, cls=cls, config=config, needs=needs, methods=methods)


def _offered(target: TargetInfo) -> list[type[Extension]]:
    """The extensions whose methods are called if a class asks for them."""
    return [each for id_, each in KNOWN.items() if id_ in target.extensions]


def _state_dir(config: SpeculativeConfig, plugin: PluginId, methods: Collection[str]) -> Path | None:
    if config.state_dir is None:
        return None
    path = as_path(config.state_dir).absolute()  # the same at the end, wherever its process works by then
    require_state(plugin, methods)
    if has_state(path):
        find_state(path, plugin)
    return path


def construct(loaded: LoadedProposer) -> Proposer:
    """An instance. Raises Refusal, or PluginLoadError SD-E116 with the author's line for anything else."""
    try:
        with attributing("SD-E116", "constructing the proposer", loaded.plugin, Refusal):
            return loaded.cls(loaded.config)
    except Refusal as refusal:
        raise refusal.attributed_on(loaded.plugin) from refusal


def options_model(cls: type, plugin: PluginId) -> type[BaseModel] | None:
    """The class's own options model, or None. Raises PluginLoadError SD-E115 if it is something else."""
    options = getattr(cls, "Options", None)
    if options is None or (isinstance(options, type) and issubclass(options, BaseModel)):
        return options
    facts = {
        "expected": "a nested class Options(StrictModel), from specdec.sdk import StrictModel",
        "found": repr(options),
    }
    raise PluginLoadError("SD-E115", f"{cls.__name__}.Options is not a pydantic model", facts, plugin=plugin)


def static_needs(cls: type, plugin: PluginId) -> Needs | None:
    """The needs that a class states as a value, by default the cheapest; None: a classmethod computes them.

    Raises PluginLoadError: SD-E114 if it is neither, SD-E111 if it cannot be called with (config, target).
    """
    raw = inspect.getattr_static(cls, "needs", Needs())
    if isinstance(raw, Needs):
        return raw
    if isinstance(raw, classmethod | staticmethod):
        check_callable(cls, "needs", ("cls", "config", "target"), plugin)
        return None
    facts = {
        "expected": "needs = Needs(...), or a classmethod needs(cls, config, target) -> Needs",
        "found": f"a {type(raw).__name__}",
        "fix": "put @classmethod above it" if inspect.isfunction(raw) else "from specdec.sdk import Needs",
    }
    raise PluginLoadError("SD-E114", f"{cls.__name__}.needs is not a statement of needs", facts, plugin=plugin)


def _needs(cls: Any, config: ProposerConfig, target: TargetInfo, plugin: PluginId) -> Needs:
    stated = static_needs(cls, plugin)
    if stated is not None:
        return stated
    needs = _asked(cls.needs, "the needs of", plugin, config, target)
    if isinstance(needs, Needs):
        return needs
    facts = {"expected": "an instance of specdec.sdk.Needs", "found": f"{type(needs).__name__}: {needs!r:.80}"}
    raise PluginLoadError("SD-E114", f"{cls.__name__}.needs returned something else", facts, plugin=plugin)


def _default_draft_tokens(cls: Any, config: ProposerConfig, target: TargetInfo, plugin: PluginId) -> int:
    """K for who left it out: what the class states, or says of the checkpoint, or else the most that it can draft."""
    stated = inspect.getattr_static(cls, "default_draft_tokens", None)
    if isinstance(stated, classmethod | staticmethod):
        check_callable(cls, "default_draft_tokens", ("cls", "model"), plugin)
        stated = _asked(cls.default_draft_tokens, "the draft length of", plugin, config.model)
    if stated is None:
        stated = _needs(cls, config, target, plugin).max_draft_tokens
    if isinstance(stated, int) and stated >= 1:
        return stated
    facts = {"expected": "an integer of at least 1: the most drafts per request and step"}
    if stated is not None:
        facts["found"] = f"{cls.__name__}.default_draft_tokens is {stated!r:.80}"
    facts["fix"] = 'add "num_speculative_tokens": 4'
    raise ConfigError("SD-E133", "speculative_config has no num_speculative_tokens", facts, plugin=plugin)


def _asked(question: Callable[..., Any], what: str, plugin: PluginId, *arguments: object) -> Any:
    """What a class answers before it is constructed. Raises Refusal, CheckpointError, or SD-E114 for anything else."""
    try:
        but = Refusal, CheckpointError  # the latter where the checkpoint is to blame
        with attributing("SD-E114", f"asking for {what}", plugin, *but):
            return question(*arguments)
    except Refusal as refusal:
        raise refusal.attributed_on(plugin) from refusal


def _no_trees(nodes: int, target: TargetInfo, plugin: PluginId) -> Refusal:
    here = "this proposer drafts chains" if Trees.id in target.extensions else f"{Trees.id} is not offered here"
    return Refusal(f"max_nodes is {nodes}, and {here}", "num_speculative_tokens alone", plugin=plugin)


def _check_length(needs: Needs, k: int, plugin: PluginId) -> None:
    nearest = max(needs.min_draft_tokens, k if needs.max_draft_tokens is None else min(k, needs.max_draft_tokens))
    if k != nearest:
        bound = f"{'most' if k > nearest else 'least'} {nearest}"
        reason = f"num_speculative_tokens is {k}, and this proposer drafts at {bound} tokens"
        raise Refusal(reason, f'"num_speculative_tokens": {nearest}', plugin=plugin)


def _options(cls: type, config: SpeculativeConfig, resolved: ResolvedProposer) -> BaseModel | None:
    plugin = resolved.plugin
    model = options_model(cls, plugin)
    values = _merged(config, model, resolved)
    if model is None:
        return None
    try:
        with attributing("SD-E115", "validating the options of", plugin, ValidationError, ConfigError):
            return model(**values)
    except ValidationError as error:
        raise wrong_values("proposer_config", error, plugin=plugin) from error
    except ConfigError as error:
        summary = error.summary.replace(model.__name__, "proposer_config", 1)
        raise ConfigError(error.code, summary, error.facts, plugin=plugin) from error.__cause__


def _merged(config: SpeculativeConfig, model: type[BaseModel] | None, resolved: ResolvedProposer) -> Mapping[str, Any]:
    """`proposer_config` and the top-level keys that the options model declares, as one mapping.

    Keys that a hook knows are left out where they ask for what is so already, and refused in its words where not.
    """
    plugin, declared = resolved.plugin, _declared_keys(model)
    nested, top_level = config.proposer_config, config.unclaimed
    twice = sorted(nested.keys() & top_level.keys())
    if twice:
        facts = {"key": ", ".join(twice), "fix": "leave it in proposer_config only"}
        raise ConfigError(
            "SD-E135", "a key stands in speculative_config and in its proposer_config", facts, plugin=plugin
        )
    explain = resolved.hooks.relay.explain_key
    answers = {key: explain(key=key, value=value) for key, value in top_level.items() if key not in declared}
    unknown = [key for key, answer in answers.items() if answer != ""]
    if unknown:
        common = frozenset(type(config).model_fields)
        told = {key: answer for key, answer in answers.items() if answer}
        raise unknown_keys("speculative_config", unknown, common | declared, told, plugin=plugin)
    unknown = [key for key in nested if key not in declared]
    is_open_ended = model is not None and model.model_config.get("extra") == "allow"
    if unknown and not is_open_ended:
        raise unknown_keys("proposer_config", unknown, declared, plugin=plugin)
    return {**nested, **{key: value for key, value in top_level.items() if key in declared}}


def _declared_keys(model: type[BaseModel] | None) -> frozenset[str]:
    fields = model.model_fields if model else {}
    aliases = (field.alias for field in fields.values() if field.alias)
    return frozenset(fields) | frozenset(aliases)
