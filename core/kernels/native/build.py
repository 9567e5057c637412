"""Compiles a C file of this package for this processor, once per machine."""

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

import torch

COMPILERS = "cc", "gcc", "clang"
FLAGS = "-O3", "-std=gnu11", "-ffp-contract=fast", "-shared", "-fPIC"
FOR_THIS_MACHINE = ("-march=native", "-fopenmp"), ("-march=native",), ()
"""What is tried in turn: Apple's compiler has no OpenMP, some processors have no name for themselves."""
TIME_LIMIT = 120  # seconds


class BuildError(Exception):
    """There is no compiler, or it failed; the text says which."""


def load_library(source: Path) -> ctypes.CDLL:
    """The library compiled from `source`, from the user's cache or built into it. Raises BuildError."""
    compiler = _compiler()
    name = f"{source.stem}-{_fingerprint(source, compiler)}.so"
    cache = _cache()
    if cache is not None:
        if not (cache / name).exists():
            _compile(compiler, source, cache / name)
        with suppress(OSError):  # nothing may be executed from there
            return ctypes.CDLL(str(cache / name))
    with tempfile.TemporaryDirectory(prefix="specdec-") as directory:  # a library that is loaded needs no file
        built = Path(directory) / name
        _compile(compiler, source, built)
        try:
            return ctypes.CDLL(str(built))
        except OSError as error:
            raise BuildError(f"what {compiler} made cannot be loaded: {error}") from error


def _compiler() -> str:
    asked = os.environ.get("CC")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"there is no C compiler {asked!r} (CC)" if asked else "there is no C compiler")


def _fingerprint(source: Path, compiler: str) -> str:
    """Of all that the result depends on; a home directory may be shared by machines with other processors."""
    processor = platform.machine(), sorted(torch.cpu.get_capabilities().items())
    facts = source.read_text(), compiler, FLAGS, FOR_THIS_MACHINE, processor
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _cache() -> Path | None:
    """Where libraries are kept; None where nothing can be written."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # nobody's home
        return None
    return cache if os.access(cache, os.W_OK) else None


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Under another name first: several processes may build at once."""
    said = ""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        for extra in FOR_THIS_MACHINE:
            command = [compiler, *FLAGS, *extra, str(source), "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{compiler} cannot be run: {error}") from error
            if done.returncode == 0:
                made.replace(target)
                return
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
    raise BuildError(f"{compiler} failed: {said}")
