"""Kernels in C: this machine's, and as they are for other processors."""

from __future__ import annotations

import platform
import tempfile
from functools import cache

import pytest

from specdec.core.kernels.cpu.native import build
from specdec.core.kernels.cpu.native.kernels import NativeKernels

LESS = {
    "no bfloat16": ["-march=native", "-mno-avx512bf16"],
    "8 lanes": ["-march=native", "-mno-avx512f"],
    "4 lanes": ["-march=native", "-mno-avx"],
    "any": [],
}


@pytest.fixture(scope="session")
def kernels():
    """This machine's."""
    return NativeKernels.load()


@pytest.fixture(params=LESS)
def lesser_kernels(request):
    """Built with less than this processor has."""
    flags = LESS[request.param]
    if flags and platform.machine() != "x86_64":
        pytest.skip("the compiler is told to leave out what only x86 has")
    return built_with(*flags)


@cache
def built_with(*flags):
    """Once in a process, because operators cannot be taken back; a library that is loaded needs no file."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setenv("XDG_CACHE_HOME", directory)
        patch.setattr(build, "FOR_THIS_MACHINE", (flags,))
        kernels = NativeKernels()
    kernels.check()
    return kernels
