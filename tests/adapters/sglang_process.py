"""A process that runs SGLang."""

from __future__ import annotations

import subprocess
import sys

TIME_LIMIT = 600  # seconds of one run; some 30 on an idle machine


def in_process(words, given, environment):
    """What a run of Python printed, errors included. SGLang kills its processes where one of them fails."""
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
    )
    return done.stdout[-6000:]
