"""Whose code raised: errors that name the plugin and the line of its author."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.sdk import PluginId, PluginLoadError, SpecdecError
from specdec.sdk.errors import message

DEBUG_HINT = "SPECDEC_DEBUG=1 shows the whole traceback"


def author_frame(error: BaseException, target: str) -> str | None:
    """The deepest "file:line in function" of an error that lies in the package of `target`.

    `target` is "module:Class". Falls back to the deepest frame outside the import system, then to None.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    package = target.partition(":")[0].partition(".")[0]
    own: str | None = None
    deepest: str | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        module = str(frame.f_globals.get("__name__", ""))
        if not frame.f_code.co_filename.startswith("<frozen"):
            deepest = place
        if f"{module}.".startswith(f"{package}.") and not f"{module}.".startswith(("specdec.core.", "specdec.sdk.")):
            own = place
    return own or deepest


def told(error: BaseException) -> str:
    """The type and text of an error, also where its text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        return f"{type(error).__name__}, whose text raises {type(second).__name__}"


def is_complete(error: SpecdecError) -> bool:
    """Whether its parts are what the constructor makes of them: an author's subclass may not have called that."""
    try:
        message(error.code, error.summary, {**error.facts}, error.plugin)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False
    return isinstance(error.code, str) and isinstance(error.summary, str)


@contextmanager
def blaming(code: str, doing: str, plugin: PluginId, *but: type[BaseException]) -> Iterator[None]:
    """Whatever a plugin raises inside becomes PluginLoadError `code`, except an interrupt and the errors of `but`."""
    try:
        yield
    except KeyboardInterrupt:  # the user's
        raise
    except BaseException as error:
        if isinstance(error, but):
            raise
        raise plugin_raised(code, doing, error, plugin) from error


def plugin_raised(code: str, doing: str, error: BaseException, plugin: PluginId) -> PluginLoadError:
    """The error for an exception that a plugin raised while the engine was `doing` something with it."""
    facts = {
        "error": told(error),
        "where": author_frame(error, plugin.target) or "unknown",
        "next": DEBUG_HINT,
    }
    return PluginLoadError(code, f'{doing} "{plugin.name}" raised {type(error).__name__}', facts, plugin=plugin)
