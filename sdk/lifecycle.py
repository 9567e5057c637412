"""Which optional methods of a class are called: those that it has, and that its version of the contract knows."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .errors import PluginId, PluginLoadError
from .proposer_protocol import ADDED_METHODS, API_VERSION, LIFECYCLE_METHODS, Proposer, ProposerBase

if TYPE_CHECKING:
    from .needs import Needs

SDK_DISTRIBUTION = "specdec-sdk"
EXTENSIONS = "specdec.sdk.extensions."  # whose methods are protocols


def api_version_of(cls: type, plugin: PluginId | None = None) -> tuple[int, int]:
    """The version that a class was written for: the lowest of our major where it states none.

    plugin: whose class it is. None means a part of another proposer.

    Raises PluginLoadError: SD-E119 for what is no version, SD-E120 for one that is not served here.
    """
    stated = getattr(cls, "api_version", None)  # optional by contract
    major, minor = API_VERSION
    if stated is None:
        return major, 0
    match = re.fullmatch(r"(\d+)\.(\d+)", stated) if isinstance(stated, str) else None
    if match is None:
        text = f"{major}.{minor}"
        facts = {"expected": '"major.minor", as a text', "found": repr(stated), "fix": f'api_version = "{text}"'}
        raise PluginLoadError("SD-E119", f"{cls.__name__}.api_version is not a version", facts, plugin=plugin)
    written_for = int(match[1]), int(match[2])
    if written_for[0] == major and written_for[1] <= minor:
        return written_for
    it, whose = ("it", plugin.distribution or plugin.name) if plugin else (cls.__name__, cls.__name__)
    fix = f"install a version of {whose} that was written for API {major}, or an older {SDK_DISTRIBUTION}"
    if written_for > API_VERSION:
        fix = f"upgrade {SDK_DISTRIBUTION}, or install a version of {whose} that was written for API {major}.{minor}"
    summary = f"{it} targets proposer API {stated}, and {SDK_DISTRIBUTION} {version(SDK_DISTRIBUTION)} provides"
    facts = {"accepted here": f"{major}.0 - {major}.{minor}", "fix": fix}
    raise PluginLoadError("SD-E120", f"{summary} {major}.{minor}", facts, plugin=plugin)


def lifecycle_methods(cls: type, plugin: PluginId | None = None) -> frozenset[str]:
    """The lifecycle methods that are called. What came after the class's version is a helper of its own.

    Raises as `api_version_of` does.
    """
    written_for = api_version_of(cls, plugin)
    known = [name for name in LIFECYCLE_METHODS if ADDED_METHODS.get(name, written_for) <= written_for]
    return frozenset(name for name in known if own_attribute(cls, name) is not None)


def extension_methods(cls: type, needs: Needs) -> frozenset[str]:
    """The methods of extensions that are called: those of the ones that the proposer asked for."""
    asked = [name for each in needs.asked for name in each.method_names()]
    return frozenset(name for name in asked if own_attribute(cls, name) is not None)


def own_attribute(cls: type, name: str) -> Any:
    """The attribute as it is stored, or None; what it only inherits from the contract counts as none."""
    raw = inspect.getattr_static(cls, name, None)
    stubs = (inspect.getattr_static(protocol, name, None) for protocol in (Proposer, ProposerBase))
    is_stub = any(raw is stub for stub in stubs) or (getattr(raw, "__module__", None) or "").startswith(EXTENSIONS)
    return None if is_stub else raw
