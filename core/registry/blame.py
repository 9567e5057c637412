"""Whose code raised: errors that name the plugin and the line of its author."""

from __future__ import annotations

import traceback

from specdec.sdk import PluginId, PluginLoadError

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
    except Exception as second:
        return f"{type(error).__name__}, whose text raises {type(second).__name__}"


def plugin_raised(code: str, doing: str, error: BaseException, plugin: PluginId) -> PluginLoadError:
    """The error for an exception that a plugin raised while the engine was `doing` something with it.

    The caller chains the exception: `raise plugin_raised(...) from error`.
    """
    facts = {
        "error": told(error),
        "where": author_frame(error, plugin.target) or "unknown",
        "next": DEBUG_HINT,
    }
    return PluginLoadError(code, f'{doing} "{plugin.name}" raised {type(error).__name__}', facts, plugin=plugin)
