"""Which proposers there are, and how the one that the user named is loaded. Nothing else knows of plugins."""

from specdec.sdk.lifecycle import SDK_DISTRIBUTION

from .attribution import author_frame, describe, is_complete
from .catalog import CLASS_PATH_METHOD, Registrations, Registry, ResolvedProposer
from .check import check_class
from .checkpoint import Recogniser
from .discovery import PluginEntry, PluginSettings
from .hooks import HookPlugins, Observers, load_hooks
from .load import LoadedProposer, construct, load_proposer
from .request_options import REQUEST_SECTION, REQUEST_SECTION_PLACE

__all__ = [
    "CLASS_PATH_METHOD",
    "REQUEST_SECTION",
    "REQUEST_SECTION_PLACE",
    "SDK_DISTRIBUTION",
    "HookPlugins",
    "LoadedProposer",
    "Observers",
    "PluginEntry",
    "PluginSettings",
    "Recogniser",
    "Registrations",
    "Registry",
    "ResolvedProposer",
    "author_frame",
    "check_class",
    "construct",
    "describe",
    "is_complete",
    "load_hooks",
    "load_proposer",
]
