"""Whether a class can be called the way the engine calls it: looked at once, at load, by its signatures."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import PluginId, PluginLoadError, SpecdecWarning, did_you_mean
from .lifecycle import extension_methods, lifecycle_methods, own_attribute
from .proposer_protocol import LIFECYCLE_METHODS, Proposer, ProposerBase

if TYPE_CHECKING:
    from .config import Extension
    from .needs import Needs


SDK = "specdec.sdk"


def check_class(candidate: Any, plugin: PluginId) -> frozenset[str]:
    """The lifecycle methods that a proposer class implements.

    Warns (SpecdecWarning) of methods that are misspelt, and never called. Raises
    PluginLoadError: SD-E113 not a class, SD-E119 and SD-E120 API version, SD-E110 no `propose`, SD-E111 a signature.
    """
    if not isinstance(candidate, type):
        found = f"{type(candidate).__name__}: {candidate!r:.80}"
        facts = {"expected": "a class", "found": found, "fix": "name the class; the engine constructs it"}
        raise PluginLoadError("SD-E113", f'"{plugin.target}" is not a class', facts, plugin=plugin)
    implemented = lifecycle_methods(candidate, plugin)
    _check_complete(candidate, plugin)
    _check_constructor(candidate, plugin)
    check_callable(candidate, "propose", _arguments(Proposer.propose), plugin)
    for name in sorted(implemented):
        check_callable(candidate, name, _arguments(getattr(ProposerBase, name)), plugin)
    for name, arguments in _left_to_write(candidate).items():
        check_callable(candidate, name, arguments, plugin)
    _warn_about_near_misses(candidate, LIFECYCLE_METHODS, plugin)
    return implemented


def check_extensions(cls: type, needs: Needs, known: Iterable[type[Extension]], plugin: PluginId) -> frozenset[str]:
    """The methods of extensions that a proposer asked for. Raises SD-E111 unless the class has each of them.

    Warns (SpecdecWarning) of methods of other extensions, which are never called, and of misspelt ones.
    """
    written = _public_methods(cls)
    for extension in known:
        _warn_about_near_misses(cls, extension.method_names(), plugin)
        for name in extension.method_names():
            arguments = _arguments(getattr(extension.methods, name))
            if needs.extension(extension) is None:
                if name in written:
                    why = f"it belongs to {extension.id}, which Needs.extensions does not ask for"
                    _warn_never_called(cls, name, written[name], why, plugin)
            elif own_attribute(cls, name) is None:
                fix = f"write it, or leave {extension.__name__} out of Needs.extensions"
                raise _wrong_signature(cls, f"{name}({', '.join(arguments)})", "no such method", plugin, fix)
            else:
                check_callable(cls, name, arguments, plugin)
    return extension_methods(cls, needs)


def _warn_never_called(cls: type, name: str, method: Any, why: str, plugin: PluginId) -> None:
    text = f"{cls.__name__}.{name} ({_place(method)}) is never called by the engine: {why}   [{plugin}]"
    warnings.warn(text, SpecdecWarning, stacklevel=2)


def check_callable(cls: type, name: str, arguments: tuple[str, ...], plugin: PluginId) -> None:
    """Raise SD-E111 unless the attribute can be called by position with `arguments` (self or cls first)."""
    raw = own_attribute(cls, name)
    expected = f"{name}({', '.join(arguments)})"
    if not callable(raw) and not isinstance(raw, classmethod):
        raise _wrong_signature(cls, expected, f"{name} is a {type(raw).__name__}, not a method", plugin)
    bound = _bound(raw, cls)
    decorator = "@staticmethod " if isinstance(raw, staticmethod) else ""  # whose first argument is no receiver
    found = f"{decorator}{_as_text(name, getattr(cls, name))}   {_place(raw)}"
    if _is_deferred(bound):
        fix = "a plain method that returns its result; this is a coroutine or a generator"
        raise _wrong_signature(cls, expected, found, plugin, fix)
    if not _accepts(bound, len(arguments) - 1):
        raise _wrong_signature(cls, expected, found, plugin)


def _check_complete(cls: type, plugin: PluginId) -> None:
    missing = set(getattr(cls, "__abstractmethods__", ()))
    if own_attribute(cls, "propose") is None:
        missing.add("propose")
    if not missing:
        return
    methods = _public_methods(cls)
    close = ((name, did_you_mean(name, methods.keys() - {name})) for name in sorted(missing))
    found = [f'"{have}" ({_place(methods[have])}) - did you mean "{want}"?' for want, have in close if have]
    facts = {"found": "\n".join(found)} if found else {}
    needed = ", ".join(_as_text(name, getattr(cls, name, Proposer.propose)) for name in sorted(missing))
    facts["needed"] = f"{needed}; everything else is optional"
    absent = ", ".join(f'"{name}"' for name in sorted(missing))
    raise PluginLoadError("SD-E110", f"{cls.__name__} is not a proposer: no method {absent}", facts, plugin=plugin)


def _left_to_write(cls: type) -> dict[str, tuple[str, ...]]:
    """What bases of the SDK leave to be written and call with a fixed number of arguments, such as `draft`."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith(SDK)]
    called = {name: getattr(base, name) for base in bases for name in sorted(getattr(base, "__abstractmethods__", ()))}
    found = {name: inspect.signature(function).parameters for name, function in called.items()}
    return {
        name: tuple(held)
        for name, held in found.items()
        if all(each.kind != each.VAR_POSITIONAL for each in held.values())
    }


def _check_constructor(cls: type, plugin: PluginId) -> None:
    if _accepts(cls, 1):
        return
    own = inspect.getattr_static(cls, "__init__")
    text = _as_text("__init__", own) if inspect.isfunction(own) else "no __init__"
    raise _wrong_signature(cls, "__init__(self, config)", f"{text}   {_place(own)}".rstrip(), plugin)


def _wrong_signature(
    cls: type,
    expected: str,
    found: str,
    plugin: PluginId,
    fix: str = "take exactly these arguments, by position",
) -> PluginLoadError:
    name = expected.partition("(")[0]
    facts = {"expected": expected, "found": found, "fix": fix}
    summary = f"{cls.__name__}.{name} cannot be called the way the engine calls it"
    return PluginLoadError("SD-E111", summary, facts, plugin=plugin)


def _warn_about_near_misses(cls: type, optional: Sequence[str], plugin: PluginId) -> None:
    """What the class calls itself is a helper of its own, and what it implements was not misspelt."""
    functions = [value for base in cls.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    known = {*optional, *(name for each in functions for name in each.__code__.co_names)}
    written = _public_methods(cls)
    absent = [name for name in optional if name not in written]
    for name, method in written.items():
        if name in known:
            continue
        event = name.startswith("on_") and optional is LIFECYCLE_METHODS
        close = did_you_mean(name.lower(), absent, cutoff=0.5 if event else 0.85)
        if close or event:
            hint = f"did you mean {close}?" if close else f"a proposer may have {', '.join(optional)}"
            _warn_never_called(cls, name, method, hint, plugin)


def _public_methods(cls: type) -> dict[str, Any]:
    """Public methods of a class by name, those of the SDK's own bases apart."""
    bases = [base for base in reversed(cls.__mro__) if not base.__module__.startswith((SDK, "builtins"))]
    stored = {name: value for base in bases for name, value in vars(base).items()}
    return {
        name: value
        for name, value in stored.items()
        if not name.startswith("_") and (callable(value) or isinstance(value, classmethod))
    }


def _bound(raw: Any, cls: type) -> Callable[..., Any]:
    """The attribute as an instance would see it, without an instance."""
    try:
        bound: Callable[..., Any] = type(raw).__get__(raw, object(), cls)
    except (AttributeError, TypeError):  # a callable that does not bind
        return raw  # type: ignore[no-any-return]
    return bound


def _accepts(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code without a signature: the call itself will tell
        return True
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        return False
    return True


def _is_deferred(function: Any) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return any(is_kind(inspect.unwrap(function)) for is_kind in kinds)


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _as_text(name: str, function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return name
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return name + text.replace(", /", "")  # every call is by position


def _place(function: Any) -> str:
    """The "file:line" of a function, or an empty text."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(inner, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
