"""Which proposers there are, and how the one that the user named is loaded. Nothing else knows of plugins."""

from specdec.sdk.lifecycle import SDK_DISTRIBUTION as SDK_DISTRIBUTION
from specdec.sdk.request_options import REQUEST_SECTION as REQUEST_SECTION
from specdec.sdk.request_options import REQUEST_SECTION_PLACE as REQUEST_SECTION_PLACE

from .attribution import author_frame as author_frame
from .attribution import author_line_now as author_line_now
from .attribution import class_of as class_of
from .catalog import CLASS_PATH_METHOD as CLASS_PATH_METHOD
from .catalog import Registry as Registry
from .catalog import ResolvedProposer as ResolvedProposer
from .discovery import PluginSettings as PluginSettings
from .hooks import HookPlugins as HookPlugins
from .hooks import Observers as Observers
from .hooks import load_hooks as load_hooks
from .load import LoadedProposer as LoadedProposer
from .load import load_proposer as load_proposer
