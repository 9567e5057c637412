"""Whether the engine at hand is one that an adapter was written for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from specdec.sdk.errors import PluginLoadError, message

logger = logging.getLogger("specdec")


def check_engine(engine: str, found: str, tried: Sequence[str], differing: Sequence[str]) -> None:
    """Raise PluginLoadError SD-E195 if what is relied on differs; warn (SD-W195) of a version that nobody tried.

    found: the engine's version. tried: versions, the newest last. differing: a line for each difference.
    """
    if differing:
        facts = {
            "found": f"{engine} {found}",
            "written for": ", ".join(tried),
            "differs": "\n".join(differing),
            "fix": f"install {engine} {tried[-1]}, or a specdec-sdk written for this one",
        }
        raise PluginLoadError("SD-E195", f"this {engine} is not the one that the adapter was written for", facts)
    if found.partition("+")[0] not in tried:
        facts = {"found": f"{engine} {found}", "tried with": ", ".join(tried)}
        logger.warning("%s", message("SD-W195", f"the adapter was not tried with this {engine}", facts))
