"""Runs something again whenever the files of the proposers that it used change."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from specdec.sdk import SpecdecError

POLL_SECONDS = 0.3
Stamps = dict[Path, tuple[int, int]]  # size and time of the last change


class Watch:
    """Runs, waits for a change, forgets the changed modules, and runs again."""

    def __init__(self, run: Callable[[], Iterable[str]], on_error: Callable[[Exception], None]) -> None:
        """run: returns the proposers' class paths. on_error: told of a run that failed after the first."""
        self._run, self._on_error = run, on_error
        self._modules: tuple[str, ...] = ()

    def forever(self) -> None:
        """Run again after every change, until it is interrupted. Raises what the first run raises, since that names no
        file to watch.
        """
        sys.dont_write_bytecode = True  # a file that changes twice in a second would be read from its stale bytecode
        self._modules = tuple(module_of(target) for target in self._run())
        while True:
            self.wait()
            self.again()

    def wait(self) -> None:
        """Wait until a file has changed."""
        before = stamps(self._modules)
        while stamps(self._modules) == before:
            time.sleep(POLL_SECONDS)

    def again(self) -> None:
        """Read the modules anew, and run."""
        for name in [name for name in sys.modules if any(_belongs(name, module) for module in self._modules)]:
            del sys.modules[name]
        importlib.invalidate_caches()
        try:
            self._run()
        except (SpecdecError, ImportError, SyntaxError) as error:
            self._on_error(error)


def module_of(target: str) -> str:
    """The module of a class path; of a class within a package, the package."""
    return target.partition(":")[0]


def stamps(modules: Iterable[str]) -> Stamps:
    """Every source file of the modules and of packages of their names, as it is now."""
    found: Stamps = {}
    for path in {path for module in modules for path in _files(module)}:
        try:
            status = path.stat()
        except OSError:  # an editor replaces it
            continue
        found[path] = status.st_size, status.st_mtime_ns
    return found


def _files(module: str) -> Iterable[Path]:
    """The module's own file, and the files beside it if it lies in a package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    return origin.parent.glob("*.py") if "." in module else [origin]


def _belongs(name: str, module: str) -> bool:
    """Whether a module is that module or lies in the same package."""
    package = module.rpartition(".")[0]
    return name == module or (bool(package) and name.startswith(f"{package}."))
