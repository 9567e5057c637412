"""Whether requests that begin alike share KV blocks, and why not."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

from specdec.sdk.errors import ConfigError
from specdec.sdk.needs import Needs

logger = logging.getLogger("specdec")


@dataclass(frozen=True)
class PrefixCaching:
    """Known before any weight is loaded."""

    enabled: bool
    because: str

    @classmethod
    def decide(cls, asked: bool | None, num_state_layers: int, needs: Needs | None) -> Self:
        """asked: as `EngineConfig.enable_prefix_caching`. Raises ConfigError SD-E338 where it was asked for in vain."""
        obstacle = None
        if num_state_layers:
            obstacle = f"{num_state_layers} layers of the target keep a state, which lies in no block"
        elif needs is not None and needs.whole_prompt:
            obstacle = "the proposer has to see whole prompts (Needs.whole_prompt)"
        if obstacle and asked:
            facts = {"because": obstacle, "fix": "leave enable_prefix_caching out"}
            raise ConfigError("SD-E338", "enable_prefix_caching was asked for, and prefixes cannot be shared", facts)
        if asked is False:
            return cls(False, "enable_prefix_caching=False")
        return cls(False, obstacle) if obstacle else cls(True, "all that layers keep of a token is in its block")

    def tell(self) -> None:
        """Say at the start of an engine what holds, and why."""
        logger.info("prefix caching is %s: %s", "on" if self.enabled else "off", self.because)


OFF = PrefixCaching(False, "enable_prefix_caching=False")
