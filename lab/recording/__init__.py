"""Recordings: what a target generated, with its probabilities and states, kept for proposers that are tried later."""

from . import fingerprint
from .manifest import SCHEMA_VERSION, Cost, Manifest
from .reader import Recording
from .request import RecordedRequest
from .writer import RecordingWriter

__all__ = ["SCHEMA_VERSION", "Cost", "Manifest", "RecordedRequest", "Recording", "RecordingWriter", "fingerprint"]
