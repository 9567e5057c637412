"""Kernels in C as they are for other processors than this one."""

from __future__ import annotations

import platform

import pytest

from specdec.core.kernels.native import build
from specdec.core.kernels.native.kernels import NativeKernels

LESS = {
    "no bfloat16": ["-march=native", "-mno-avx512bf16"],
    "8 lanes": ["-march=native", "-mno-avx512f"],
    "4 lanes": ["-march=native", "-mno-avx"],
    "any": [],
}


@pytest.fixture(scope="session", params=LESS)
def lesser_kernels(request, tmp_path_factory):
    """Built with less than this processor has; once, because operators cannot be taken back."""
    flags = LESS[request.param]
    if flags and platform.machine() != "x86_64":
        pytest.skip("the compiler is told to leave out what only x86 has")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(build, "FOR_THIS_MACHINE", (flags,))
        kernels = NativeKernels()
    kernels.check()
    return kernels
