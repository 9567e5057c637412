"""Which proposers there are, and how the one that the user named is loaded. Nothing else knows of plugins."""

from .attribution import author_frame, describe, is_complete
from .catalog import Registrations, Registry, ResolvedProposer
from .checkpoint import Recogniser
from .discovery import PluginEntry, PluginSettings
from .load import LoadedProposer, construct, load_proposer

__all__ = [
    "LoadedProposer",
    "PluginEntry",
    "PluginSettings",
    "Recogniser",
    "Registrations",
    "Registry",
    "ResolvedProposer",
    "author_frame",
    "construct",
    "describe",
    "is_complete",
    "load_proposer",
]
