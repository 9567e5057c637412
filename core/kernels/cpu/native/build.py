"""Compiles the C files of this package into a library for this processor, once per machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

COMPILERS = "cc", "gcc", "clang"
FLAGS = "-O3", "-std=gnu11", "-ffp-contract=fast", "-fexceptions", "-fvisibility=hidden", "-shared", "-fPIC"
FOR_THIS_MACHINE = ("-march=native", "-fopenmp"), ("-march=native",), ()
"""What is tried in turn: Apple's compiler has no OpenMP, some processors have no name for themselves."""
TIME_LIMIT = 120  # seconds


class BuildError(Exception):
    """There is no compiler, or it failed; the text says which."""


class Library(NamedTuple):
    """What was compiled."""

    functions: ctypes.CDLL
    name: str  # an identifier, another one for other sources, compilers and processors


def load_library(sources: Path) -> Library:
    """A library of all C files of a directory, from the user's cache or built into it. Raises BuildError."""
    compiler = _compiler()
    name = f"specdec_{_fingerprint(sources, compiler)}"
    cache = _cache()
    if cache is not None:
        kept = cache / f"{name}.so"
        if not kept.exists():
            _compile(compiler, sources, kept)
        with suppress(OSError):  # nothing may be executed from there
            return Library(ctypes.CDLL(str(kept)), name)
    with tempfile.TemporaryDirectory(prefix="specdec-") as directory:  # a library that is loaded needs no file
        built = Path(directory) / f"{name}.so"
        _compile(compiler, sources, built)
        try:
            return Library(ctypes.CDLL(str(built)), name)
        except OSError as error:
            raise BuildError(f"what {compiler} made cannot be loaded: {error}") from error


def _compiler() -> str:
    asked = os.environ.get("CC")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"there is no C compiler {asked!r} (CC)" if asked else "there is no C compiler")


def _fingerprint(sources: Path, compiler: str) -> str:
    """Hash everything that the result depends on: machines with other processors may share a home directory."""
    processor = platform.machine(), sorted(torch.cpu.get_capabilities().items())
    texts = [each.read_text() for each in sorted(sources.glob("*.[ch]"))]
    facts = texts, compiler, FLAGS, FOR_THIS_MACHINE, processor, torch.__version__, torch.__file__
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _cache() -> Path | None:
    """Where libraries are kept; None where nothing can be written."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # nobody's home
        return None
    return cache if os.access(cache, os.W_OK) else None


def _compile(compiler: str, sources: Path, target: Path) -> None:
    """Compile under another name first, because several processes may build at once."""
    said = ""
    files = sorted(map(str, sources.glob("*.c")))
    torch_libraries = Path(torch.__file__).with_name("lib")
    linked = f"-L{torch_libraries}", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}"
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        for extra in FOR_THIS_MACHINE:
            command = [compiler, *FLAGS, *extra, *files, *linked, "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{compiler} cannot be run: {error}") from error
            if done.returncode == 0:
                made.replace(target)
                return
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
    raise BuildError(f"{compiler} failed: {said}")
