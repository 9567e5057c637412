"""What serves a protocol of the contract takes its arguments by the protocol's own names."""

from __future__ import annotations

import inspect

import pytest

from specdec.core.proposing.services import BlockDraftKV, EngineServices
from specdec.core.proposing.target_access import CachedKV, CachedLayers
from specdec.core.proposing.views import DeviceHistory, HostHistory, StepRandom
from specdec.sdk import Services
from specdec.sdk.extensions import DraftKVStore, LayerRunner, TargetKVReader
from specdec.sdk.types import DraftRandom, TokenHistory
from specdec.testing import FakeServices
from specdec.testing.fakes import FakeDraftKV, FakeHistory, FakeRandom


@pytest.mark.parametrize(
    ("protocol", "implementation"),
    [
        (DraftKVStore, BlockDraftKV),
        (DraftKVStore, FakeDraftKV),
        (TargetKVReader, CachedKV),
        (LayerRunner, CachedLayers),
        (Services, EngineServices),
        (Services, FakeServices),
        (TokenHistory, HostHistory),
        (TokenHistory, DeviceHistory),
        (TokenHistory, FakeHistory),
        (DraftRandom, StepRandom),
        (DraftRandom, FakeRandom),
    ],
    ids=lambda each: each.__name__,
)
def test_an_implementation_takes_the_names_of_its_protocol(protocol, implementation):
    methods = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]
    assert methods
    for name in methods:
        found, named = (list(inspect.signature(getattr(each, name)).parameters) for each in (implementation, protocol))
        assert found == named
