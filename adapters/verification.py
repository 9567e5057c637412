"""What other engines do with drafts and ours does not leave to them: they verify every one."""

from __future__ import annotations

from specdec.core.host import SpeculativeConfig
from specdec.sdk.errors import ConfigError


def refuse_adaptive(config: SpeculativeConfig, engine: str) -> None:
    """Raise ConfigError SD-E237 for a budget that this engine cannot keep."""
    if config.enable_adaptive_verification:
        facts = {
            "found": '"enable_adaptive_verification": true',
            "why": f"{engine} plans its own steps, and verifies every draft that it is given",
            "fix": "leave it out here, or cut drafts with the combinator Adaptive",
        }
        raise ConfigError("SD-E237", f"{engine} has no adaptive verification for this proposer", facts)
