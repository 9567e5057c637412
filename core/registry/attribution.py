"""Find whose code raised: errors name the plugin and the line of its author."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType

from specdec.sdk.errors import PluginId, PluginLoadError, SpecdecError, message


def author_frame(error: BaseException, target: str) -> str | None:
    """The "file:line in function" of an author that an error leads back to. `target` is "module:Class".

    The deepest frame in the target's package; else the author's method that inherited code called last, as for an error
    about what it returned; else the deepest frame outside the import system, behind the author's class if that frame
    is ours; else None.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return _author_line(traceback.walk_tb(error.__traceback__), target)


def author_line_now(frame: FrameType | None, target: str) -> str | None:
    """The author's line of a thread that stands at a frame, found as `author_frame` finds that of an error."""
    stack = traceback.walk_stack(frame) if frame is not None else ()
    return _author_line(reversed(list(stack)), target)


def _author_line(stack: Iterable[tuple[FrameType, int]], target: str) -> str | None:
    """Find the author's line in a stack, the outermost frame first."""
    package = target.partition(":")[0].partition(".")[0]
    frames = [each for each in stack if not each[0].f_code.co_filename.startswith("<frozen")]  # not those of an import
    own = [each for each in frames if _module(each[0]).partition(".")[0] == package and not _is_ours(_module(each[0]))]
    cls = class_of(target)
    if cls is not None and not own and (called := _called(cls, [frame for frame, _ in frames])):
        return called
    for frame, line in reversed(own or frames):
        place = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        return f"{_line_of(cls)}, raised at {place}" if cls is not None and _is_ours(_module(frame)) else place
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
    """Whether it is no author's: first-party plugins are authors too."""
    return module.startswith("specdec.") and not module.startswith("specdec.plugins.")


def class_of(target: str) -> type | None:
    """What "module:Class" names, if it is a class that was imported."""
    module, _, path = target.partition(":")
    found: object = sys.modules.get(module)
    for name in path.split("."):
        found = vars(found).get(name) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) else None


def _line_of(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]} class {cls.__name__}"
    except (OSError, TypeError):  # it was made without a file
        return f"class {cls.__name__}"


def _called(cls: type, frames: Sequence[FrameType]) -> str | None:
    """Where the author wrote the method that one of the class's inherited methods calls: the deepest such call."""
    written = {name: value for name, value in vars(cls).items() if isinstance(value, FunctionType)}
    for frame in reversed(frames):
        if isinstance(frame.f_locals.get("self"), cls):
            for name in filter(written.__contains__, frame.f_code.co_names):
                code = written[name].__code__
                return f"{code.co_filename}:{code.co_firstlineno} in {name}"
    return None


_TOKENS = "extensions=(TargetTokens(top_k=8),)"
FIELDS = {  # of a step that are None or empty unless they were declared: how it is done
    "history": "history=True",
    "hidden": 'hidden_states=("final",)',
    "sampling": 'sampling=("temperature",)',
    "top_ids": _TOKENS,
    "top_logprobs": _TOKENS,
    "rejected": "extensions=(TargetTokens(top_k=8, rejected=True),)",
}


def undeclared(error: BaseException, absent: Container[str]) -> list[str]:
    """Which absent ones of `FIELDS` the code reads that stumbled over nothing."""
    if not _stumbled_over_nothing(error):
        return []
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    theirs = [frame for frame in frames if not _module(frame).startswith("specdec.core.")]
    read = {name for frame in theirs for name in frame.f_code.co_names}
    found = [name for name in FIELDS if name in read and name in absent]
    return [name for name in found if not name.startswith("top_") or "rejected" not in found]


def _stumbled_over_nothing(error: BaseException) -> bool:
    """Whether the error comes of None, or of the empty tuple of hidden states."""
    if isinstance(error, TypeError | AttributeError):
        return "NoneType" in str(error)
    return isinstance(error, IndexError) or (isinstance(error, ValueError) and str(error).endswith("got 0)"))


def describe(error: BaseException) -> str:
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
def attributing(code: str, doing: str, plugin: PluginId, *but: type[BaseException]) -> Iterator[None]:
    """Turn whatever a plugin raises inside into PluginLoadError `code`. An interrupt and the errors of `but` pass."""
    sys.audit("specdec.call", plugin, doing)
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, *but)):  # an interrupt is the user's
            raise
        where = author_frame(error, plugin.target) or "unknown"
        facts = {"error": describe(error), "where": where, "next": "SPECDEC_DEBUG=1 shows the whole traceback"}
        summary = f'{doing} "{plugin.name}" raised {type(error).__name__}'
        raise PluginLoadError(code, summary, facts, plugin=plugin) from error
    finally:
        sys.audit("specdec.call_ended")
