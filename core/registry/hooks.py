"""pluggy's side: load hook plugins one by one, collect what they register, call observers without risk."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pluggy

from specdec.sdk.errors import PluginId, PluginLoadError, SpecdecError, did_you_mean, message
from specdec.sdk.hooks import PROJECT_NAME, HookSpecs

from .attribution import attributing, author_frame, describe
from .discovery import TARGET, PluginEntry, PluginSettings, discover
from .importing import import_target

logger = logging.getLogger("specdec")

HOOK_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))
OBSERVER_NAMES = tuple(name for name in HOOK_NAMES if name.startswith("on_"))
FAILURES_ALLOWED = 3

Observers = pluggy.HookRelay
"""The `on_*` hooks, as pluggy calls them. A listener that raises loses that call; at its third failure, all calls."""


@dataclass(frozen=True)
class Offer:
    """One `registry.add(name, value)` of a `register_*` hook."""

    plugin: PluginId
    name: str
    value: Any


class _Registry:
    """The `registry` that one plugin's `register_*` hook is called with."""

    def __init__(self, plugin: PluginId, hook_name: str, found: list[Offer]) -> None:
        self._plugin = plugin
        self._hook_name = hook_name
        self._found = found  # of all plugins

    def add(self, name: str, value: Any) -> None:
        """Offer `value` under `name`. Raises PluginLoadError SD-E118 if this plugin has offered it before."""
        for offer in self._found:
            if (offer.plugin, offer.name) == (self._plugin, name):
                facts = {"hook": self._hook_name, "before": repr(offer.value), "now": repr(value)}
                raise PluginLoadError("SD-E118", f'the name "{name}" is offered twice', facts, plugin=self._plugin)
        self._found.append(Offer(self._plugin, name, value))


class HookPlugins:
    """The hook plugins of one engine or command, registered under `dist:name`."""

    def __init__(self, entries: tuple[PluginEntry, ...] = ()) -> None:
        """Load each usable entry on its own: one that fails becomes a broken row and a warning."""
        self._manager = pluggy.PluginManager(PROJECT_NAME)
        self._manager.add_hookspecs(HookSpecs)
        self._failures: Counter[PluginId] = Counter()
        self.entries = tuple(self._loaded(entry) if entry.status == "ok" else entry for entry in entries)
        self.relay: pluggy.HookRelay = self._manager.hook  # calls any hook
        self.observers: Observers = self.relay

    def proposers(self) -> tuple[PluginEntry, ...]:
        """Proposers without an entry point. Raises PluginLoadError SD-E118 if a hook fails."""
        return tuple(_offered_proposer(offer) for offer in self.offers("register_proposers"))

    def recognisers(self) -> tuple[Offer, ...]:
        """Offers that say which checkpoints a proposer is for. Raises PluginLoadError SD-E118 if a hook fails."""
        return tuple(_checked_recogniser(offer) for offer in self.offers("register_speculator_config"))

    def adapted(self, candidate: Any) -> Any:
        """A proposer around a class for another engine; anything else comes back."""
        found = self.relay.adapt_proposer(candidate=candidate)
        return candidate if found is None else found

    def offers(self, hook_name: str) -> list[Offer]:
        """Everything that plugins add in one `register_*` hook. Strict: raises PluginLoadError SD-E118."""
        found: list[Offer] = []
        getattr(self._manager.hook, hook_name)(registry=found)
        return found

    def add(self, plugin: object, name: str) -> None:
        """Call the hooks of an object of this process too. Raises PluginLoadError SD-E117 for an unusable hook."""
        kind = type(plugin)
        self._admit(plugin, PluginId(name, f"{kind.__module__}:{kind.__qualname__}"))

    def _loaded(self, entry: PluginEntry) -> PluginEntry:
        try:
            loaded = import_target(entry.plugin, "plugin")
            with attributing("SD-E117", "registering the plugin", entry.plugin):
                plugin = loaded() if isinstance(loaded, type) else loaded
            self._admit(plugin, entry.plugin)
        except SpecdecError as error:
            logger.warning("SD-W101 the plugin %s is not loaded\n%s", entry.plugin, error)
            return replace(entry, status="broken", code=error.code, reason=str(error))
        return entry

    def _admit(self, plugin: object, who: PluginId) -> None:
        try:
            with attributing("SD-E117", "registering the plugin", who):
                self._manager.register(plugin, who.label)
        except PluginLoadError:
            if self._manager.has_plugin(who.label):  # older pluggy leaves half a registration behind
                self._manager.unregister(name=who.label)
            raise
        problem = _unusable_hook(self._manager, plugin)
        if problem:
            self._manager.unregister(plugin)
            raise PluginLoadError("SD-E117", "a plugin has an unusable hook", {"found": problem}, plugin=who)
        for hook_name, impl in _implementations(self._manager, plugin):
            guarded = self._contained if hook_name in OBSERVER_NAMES else _attributed
            # pluggy calls all of a hook's implementations at once: what surrounds one stands in its place
            impl.function = guarded(impl.function, hook_name, who)  # type: ignore[misc]

    def _contained(self, function: Callable[..., Any], hook_name: str, plugin: PluginId) -> Callable[..., None]:
        """An observer that loses the call it raises in, and all its hooks at the third."""

        def notified(*arguments: Any, **more: Any) -> None:
            try:
                function(*arguments, **more)
            except KeyboardInterrupt:  # the user's
                raise
            except BaseException as error:
                logger.debug("%s of the plugin %s raised", hook_name, plugin, exc_info=error)
                self._failures[plugin] += 1
                if self._failures[plugin] == FAILURES_ALLOWED:
                    self._manager.unregister(name=plugin.label)
                    _warn_unregistered(hook_name, plugin, error, function.__module__)

        return notified


def load_hooks(settings: PluginSettings) -> HookPlugins:
    """Load the hooks of installed distributions. A name that is offered twice is loaded from nobody."""
    return HookPlugins(discover("plugins", settings))


def _attributed(function: Callable[..., Any], hook_name: str, plugin: PluginId) -> Callable[..., Any]:
    """A hook whose answer counts: the plugin is named in what it raises, offers or answers."""

    def called(*arguments: Any, **more: Any) -> Any:
        with attributing("SD-E118", f"{hook_name} of the plugin", plugin, SpecdecError):
            if hook_name.startswith("register_"):
                return function(*(_Registry(plugin, hook_name, found) for found in arguments))
            answer = function(*arguments, **more)
            if hook_name == "resolve_proposer" and answer is not None:
                return _checked_target(answer, plugin)
            return answer

    return called


def _warn_unregistered(hook_name: str, plugin: PluginId, error: BaseException, module: str) -> None:
    facts = {
        "error": f"{hook_name} raised {describe(error)}",
        "where": author_frame(error, module),
        "effect": "none of its hooks is called any more; the requests and other listeners are not affected",
    }
    summary = f"a plugin is unregistered after {FAILURES_ALLOWED} failures"
    logger.warning("%s", message("SD-W102", summary, facts, plugin))


def _implementations(manager: pluggy.PluginManager, plugin: object) -> list[tuple[str, pluggy.HookImpl]]:
    """A registered plugin's own, by the hook's name."""
    callers = manager.get_hookcallers(plugin) or ()
    return [(caller.name, impl) for caller in callers for impl in caller.get_hookimpls() if impl.plugin is plugin]


def _unusable_hook(manager: pluggy.PluginManager, plugin: object) -> str | None:
    """pluggy's `check_pending`, for one plugin and with a suggestion; wrappers, and a plugin without hooks, too."""
    implementations = _implementations(manager, plugin)
    if not implementations:
        return "it has no hook; put @hookimpl from specdec.sdk above each function that is one"
    for name, impl in implementations:
        if name not in HOOK_NAMES and not impl.optionalhook:
            close = did_you_mean(name, HOOK_NAMES)
            hint = f"did you mean {close}?" if close else f"hooks are {', '.join(HOOK_NAMES)}"
            return f"there is no hook {name}; {hint}"
        if impl.wrapper or impl.hookwrapper:
            return f"{name} is a wrapper; every hook is called on its own, with nothing to wrap"
    return None


def _offered_proposer(offer: Offer) -> PluginEntry:
    return PluginEntry(
        kind="proposers",
        name=offer.name,
        target=_checked_target(offer.value, offer.plugin),
        distribution=offer.plugin.distribution,
        version=offer.plugin.version,
    )


def _checked_recogniser(offer: Offer) -> Offer:
    if not callable(offer.value):
        facts = {"expected": "callable(Checkpoint) -> bool", "found": repr(offer.value)}
        summary = f'what recognises checkpoints of "{offer.name}" cannot be called'
        raise PluginLoadError("SD-E118", summary, facts, plugin=offer.plugin)
    return offer


def _checked_target(target: Any, plugin: PluginId) -> str:
    match = TARGET.fullmatch(target) if isinstance(target, str) else None
    if match is None or match["attribute"] is None:
        facts = {"expected": '"package.module:Class"', "found": repr(target)}
        raise PluginLoadError("SD-E118", "a plugin names a proposer that is no class path", facts, plugin=plugin)
    return f"{match['module']}:{match['attribute']}"
