"""Where the kernels in C come from, and what happens where they cannot be built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from specdec.core.engine.device import profile_of
from specdec.core.kernels.cpu.backend import CpuBackend
from specdec.core.kernels.cpu.native.build import BuildError, load_library
from specdec.core.kernels.cpu.native.kernels import SOURCES, NativeKernels
from specdec.sdk import ConfigError


@pytest.mark.slow
def test_a_library_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library(SOURCES)
    (built,) = (tmp_path / "specdec").iterdir()
    changed = built.stat().st_mtime_ns
    load_library(SOURCES)
    assert [each.stat().st_mtime_ns for each in (tmp_path / "specdec").iterdir()] == [changed]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_to_is_no_obstacle(tmp_path, monkeypatch):
    occupied = tmp_path / "cache"
    occupied.write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    assert load_library(SOURCES).functions.head_size_multiple() > 0


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        ("no-such-compiler", "there is no C compiler 'no-such-compiler'"),
        ("false", "failed: exit status 1"),
        (sys.executable, "failed: "),
    ],
)
def test_a_compiler_that_fails_is_named(compiler, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(BuildError, match=expected):
        load_library(SOURCES)
    assert not any((tmp_path / "specdec").glob("*")), "nothing half made is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("attention.c", "* layer->scale", "* 2 * layer->scale"),
        ("linear.c", "weights[v] * (floats)value", "weights[v] * (floats)value * 2"),
    ],
)
def test_wrong_results_are_noticed(file, right, wrong, tmp_path, monkeypatch):
    """A compiler may be wrong; here the program is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = tmp_path / "sources"
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    (sources / file).write_text(text.replace(right, wrong))
    assert (sources / file).read_text() != text
    with pytest.raises(BuildError, match="other results than PyTorch"):
        NativeKernels(sources).check()


def test_threads_load_the_same_kernels():
    """In a process of its own: an operator is registered once."""
    program = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from specdec.core.kernels.cpu.native.kernels import NativeKernels\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    print(len(set(pool.map(lambda _: NativeKernels.load(), range(4)))))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_a_gpu_has_no_choice():
    assert not isinstance(profile_of(torch.device("cuda")).backend, CpuBackend)
    with pytest.raises(ConfigError, match="SD-E137"):
        profile_of(torch.device("cuda"), "native")


@pytest.mark.full
def test_the_engine_says_what_it_does_without_a_compiler(tmp_path):
    """In a process of its own: kernels are loaded once."""
    program = (
        "import logging; logging.basicConfig()\n"
        "from specdec import LLM, SamplingParams\n"
        "from specdec.sdk import ConfigError\n"
        "params = SamplingParams(temperature=0, max_tokens=3)\n"
        "print(LLM('tiny').generate('import os', params)[0].outputs[0].text)\n"
        "print(LLM('tiny', cpu_kernels='torch').generate('import os', params)[0].outputs[0].text)\n"
        "try:\n    LLM('tiny', cpu_kernels='native')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = os.environ | {"CC": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SD-W304") == 1, "said where it was not asked for"
    assert "no C compiler 'no-such-compiler'" in done.stderr
    assert "SD-E137" in done.stdout
