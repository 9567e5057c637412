"""What to run in another engine in the place of `LLM(model, speculative_config=...)`."""

from .answer import HandOver
from .hand_over import ENGINES, hand_over

__all__ = ["ENGINES", "HandOver", "hand_over"]
