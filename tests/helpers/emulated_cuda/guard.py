"""Compiles and loads the device guard that tensors on a CUDA device need, once per process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("guard.cpp")


def can_be_had() -> bool:
    """Whether this machine can emulate a device: it has a C++ compiler, and a PyTorch without CUDA of its own."""
    return shutil.which("g++") is not None and torch.version.cuda is None and torch.version.hip is None


@cache
def register_guard() -> None:
    """Kept in the user's folder for temporary files; processes that build it at once replace equal files."""
    home = Path(torch.__file__).parent
    built = Path(tempfile.gettempdir()) / f"specdec-tests-{os.getuid()}" / f"cuda-guard-{torch.__version__}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            command = ["g++", "-std=c++20", "-fPIC", "-shared", f"-I{home / 'include'}", "-o", str(made), str(SOURCE)]
            subprocess.run([*command, f"-L{home / 'lib'}", "-lc10"], check=True, timeout=600)
            made.replace(built)
    ctypes.CDLL(str(built))
