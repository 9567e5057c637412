"""What proposer authors import in their tests: fakes that need no engine, no checkpoint and no GPU."""

from .fakes import FakeDraftKV, FakeRandom, FakeServices, fake_target_info, step_view

__all__ = ["FakeDraftKV", "FakeRandom", "FakeServices", "fake_target_info", "step_view"]
