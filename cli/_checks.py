"""The checks of `specdec doctor`. What is supported is read from our own package metadata, not repeated here."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import importlib_metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import specdec
from specdec.core.registry.discovery import Kind, PluginEntry, PluginSettings, discover
from specdec.sdk.lifecycle import SDK_DISTRIBUTION

from ._tried import installed, said_of

IMPORT_PACKAGE = "specdec"
PARTS = ("core", "sdk", "adapters", "testing", "lab", "cli", "plugins", "assets")
COMPILERS = ("c++", "g++", "clang++")
INSTALL_TORCH = "a torch for this GPU and its driver: https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str
    status: Literal["ok", "note", "wrong"]
    found: str
    fix: str | None = None


def examine(settings: PluginSettings) -> list[Finding]:
    """All checks, in the order in which one would repair."""
    return [
        *check_versions(),
        *check_tried(),
        check_owner(importlib_metadata.packages_distributions().get(IMPORT_PACKAGE, ())),
        check_parts(Path(specdec.__file__).parent),
        check_device(),
        check_compiler(),
        check_kernels(),
        *check_gpu_kernels(),
        *check_text_equality(),
        *check_plugins(settings),
    ]


def check_versions() -> Iterator[Finding]:
    """Python and every distribution that we require, against the required range."""
    try:
        own = importlib_metadata.distribution(SDK_DISTRIBUTION)
    except importlib_metadata.PackageNotFoundError:
        fix = f"pip install {SDK_DISTRIBUTION}, or pip install -e . in a checkout"
        yield Finding(SDK_DISTRIBUTION, "wrong", "not installed, so no entry point is known", fix)
        return
    yield Finding(SDK_DISTRIBUTION, "ok", own.version)
    yield _version("python", platform.python_version(), SpecifierSet(own.metadata["Requires-Python"]))
    for text in own.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _version(requirement.name, _installed(requirement.name), requirement.specifier)


def _version(name: str, installed: str | None, supported: SpecifierSet) -> Finding:
    if installed is None:
        return Finding(name, "wrong", "not installed", f'pip install "{name}{supported}"')
    if supported.contains(installed, prereleases=True):
        return Finding(name, "ok", f"{installed} (supported: {supported})")
    return Finding(name, "wrong", f"{installed} (supported: {supported})", f'install "{name}{supported}"')


def _installed(name: str) -> str | None:
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return None


def check_tried() -> Iterator[Finding]:
    """Whether our tests ran with just these versions of what decides most."""
    try:
        versions = installed()
    except importlib_metadata.PackageNotFoundError:  # of which another check tells
        return
    passed, text = said_of(versions)
    subject = "tried together: " + ", ".join(" ".join(each) for each in versions.items())
    yield Finding(subject, "ok" if passed else "note", text)


def check_owner(owners: list[str] | tuple[str, ...]) -> Finding:
    """Whether another distribution has written into the import package: `specdec` on PyPI is somebody else's."""
    strangers = sorted(set(owners) - {SDK_DISTRIBUTION})
    subject = f"owner of the import package {IMPORT_PACKAGE}"
    if not strangers:
        return Finding(subject, "ok", f"{SDK_DISTRIBUTION}, in {Path(specdec.__file__).parent}")
    fix = f"pip uninstall -y {' '.join(strangers)} && pip install --force-reinstall --no-deps {SDK_DISTRIBUTION}"
    return Finding(subject, "wrong", f"also {', '.join(strangers)}, which overwrites files of ours", fix)


def check_parts(package: Path) -> Finding:
    """Whether the folders of the package are there; in an editable checkout they are links."""
    missing = [name for name in PARTS if not (package / name).is_dir()]
    links = [name for name in PARTS if (package / name).is_symlink()]
    kind = "an editable checkout" if links else "an installed copy"
    if not missing:
        return Finding("package folders", "ok", f"{kind}: {', '.join(PARTS)}")
    fix = "in a checkout: git config core.symlinks true && git checkout -- src/specdec; else reinstall"
    return Finding("package folders", "wrong", f"no folder {', '.join(missing)} in {package}", fix)


def check_device() -> Finding:
    """Whether torch can be imported, and what it runs on."""
    try:
        import torch
    except Exception as error:
        return Finding("device", "wrong", f"importing torch raised {type(error).__name__}: {error}", "reinstall torch")
    if not torch.cuda.is_available():
        from specdec.core.engine.device import why_no_gpu

        why = why_no_gpu()
        return Finding("device", "note", why, INSTALL_TORCH) if why else Finding("device", "ok", "CPU; no CUDA device")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding("device", "ok", f"CUDA {torch.version.cuda}: {names}")


def check_compiler() -> Finding:
    """A C++ compiler is needed only by torch.compile on a CPU."""
    asked = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, [asked] if asked else COMPILERS)), None)
    if found:
        return Finding("C++ compiler", "ok", found)
    return Finding("C++ compiler", "note", f"none of {asked or ', '.join(COMPILERS)}", "needed for torch.compile only")


def check_kernels() -> Finding:
    """Whether our kernels for a CPU can be had; they are built here if they were not."""
    try:
        import torch

        from specdec.core.engine.device import profile_of
        from specdec.sdk import ConfigError
    except Exception as error:  # torch, of which another check tells
        return Finding("kernels for a CPU", "note", f"not examined: {type(error).__name__}: {error}")
    try:
        profile_of(torch.device("cpu"), "native")
    except ConfigError as error:
        return Finding(
            "kernels for a CPU", "note", f"PyTorch's: {error.facts['because']}", "install gcc, for faster steps"
        )
    return Finding("kernels for a CPU", "ok", "native, built for this processor")


def check_gpu_kernels() -> Iterator[Finding]:
    """Whether our kernels for a GPU run, where torch has one."""
    try:
        import torch

        from specdec.core.kernels.backend import BACKENDS, Unavailable, find_backend
    except Exception:  # torch, of which another check tells
        return
    if not torch.cuda.is_available():
        return
    try:
        find_backend(BACKENDS["cuda"][0])
    except (ImportError, Unavailable) as error:
        fix = "install triton, gcc and a driver for this torch: without our kernels steps take many times as long"
        yield Finding("kernels for a GPU", "note", f"PyTorch's: {error}", fix)
    else:
        yield Finding("kernels for a GPU", "ok", "Triton's, which run")


def check_text_equality() -> Iterator[Finding]:
    """What is promised of text with drafts, in each dtype, of a model whose every layer our kernels can compute."""
    try:
        import torch

        from specdec.core.engine.device import device_of, profile_of
    except Exception:  # torch, of which another check tells
        return
    profile = profile_of(device_of("auto"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        promise = profile.text_equality(dtype)
        subject = f"text in {str(dtype).removeprefix('torch.')} on this {profile.device.type}"
        yield Finding(subject, "ok" if promise.level == "bits" else "note", promise.sentence, promise.fix)


def check_plugins(settings: PluginSettings) -> Iterator[Finding]:
    """Every plugin that cannot be used by its name, and every name in the settings that nobody has."""
    entries = [row for kind in get_args(Kind) for row in discover(kind, settings)]
    unusable = [entry for entry in entries if entry.status != "ok"]
    if len(unusable) < len(entries):
        usable = [entry.label for entry in entries if entry.status == "ok"]
        yield Finding("plugins", "ok", ", ".join(usable))
    yield from map(_plugin_finding, unusable)
    for name in sorted((settings.allow or frozenset()) | settings.deny):
        if not any(entry.is_meant_by(name) for entry in entries):
            yield Finding(f"plugin {name}", "note", "allowed or denied by the settings, and offered by nobody")


def _plugin_finding(entry: PluginEntry) -> Finding:
    fixes = {
        "broken": "reinstall or upgrade the distribution, or deny the plugin with SPECDEC_DISABLE_PLUGINS",
        "duplicate": f'ask for "{entry.label}", or deny the others with SPECDEC_DISABLE_PLUGINS',
    }
    status: Literal["note", "wrong"] = "note" if entry.status == "blocked" else "wrong"
    found = f"{entry.status}: {entry.reason}   [{entry.plugin}]"
    return Finding(f"plugin {entry.label}", status, found, fixes.get(entry.status))
