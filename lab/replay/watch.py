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
CLOCK_NS = 10_000_000  # by which the time of a file's change may lag behind
Stamps = dict[Path, tuple[int, int]]  # size and time of the last change


class Watch:
    """Runs, waits for a change, forgets the changed modules, and runs again."""

    def __init__(self, run: Callable[[], Iterable[str]], on_error: Callable[[Exception], None]) -> None:
        """run: returns the proposers' class paths. on_error: told of a run that failed after the first."""
        self._run, self._on_error = run, on_error
        self._modules: tuple[str, ...] = ()
        self._places: list[Path] = []

    def forever(self) -> None:
        """Run again after every change, until it is interrupted. Raises what the first run raises, since that names no
        file to watch.
        """
        sys.dont_write_bytecode = True  # a file that changes twice in a second would be read from its stale bytecode
        began = time.time_ns() - CLOCK_NS
        self._modules = tuple(target.partition(":")[0] for target in self._run())
        self._places = places_of(self._modules)
        before = {path: stamp for path, stamp in stamps(self._places).items() if stamp[1] < began}
        while True:
            self.wait(before)
            before = stamps(self._places)  # taken first, so that a change during the run is noticed after it
            self.again()

    def wait(self, before: Stamps) -> None:
        """Wait until a file is not as before."""
        while stamps(self._places) == before:
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


def places_of(modules: Iterable[str]) -> list[Path]:
    """The file of each module, or the folder of the package that it lies in."""
    found = ((module, importlib.util.find_spec(module)) for module in modules)
    origins = ((module, Path(spec.origin)) for module, spec in found if spec is not None and spec.origin is not None)
    return [origin.parent if "." in module else origin for module, origin in origins]


def stamps(places: Iterable[Path]) -> Stamps:
    """Every source file in those places, as it is now."""
    found: Stamps = {}
    for path in {path for place in places for path in (place.glob("*.py") if place.is_dir() else [place])}:
        try:
            status = path.stat()
        except OSError:  # an editor replaces it
            continue
        found[path] = status.st_size, status.st_mtime_ns
    return found


def _belongs(name: str, module: str) -> bool:
    """Whether a module is that module, its package, or lies in the same package."""
    package = module.rpartition(".")[0]
    return name == module or (bool(package) and f"{name}.".startswith(f"{package}."))
