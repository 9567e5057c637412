"""Which proposers there are, and how the one that the user named is loaded. Nothing else knows of plugins."""

from .blame import author_frame, is_complete, told
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
    "is_complete",
    "load_proposer",
    "describe",
]
