"""Import a plugin in a process of its own, so that even a crash or a hang of its import is only a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace

from specdec.sdk import PluginId, SpecdecError

from ..registry.discovery import PluginEntry

TIMEOUT_S = 20.0
DONE = "specdec: imported"


def probe(entry: PluginEntry, timeout_s: float = TIMEOUT_S) -> PluginEntry:
    """The entry, marked broken with the reason if it cannot be imported or its class cannot be called."""
    if entry.status not in ("ok", "duplicate"):
        return entry
    reason = _failure(entry, timeout_s)
    return replace(entry, status="broken", code="SD-E103", reason=reason) if reason else entry


def _failure(entry: PluginEntry, timeout_s: float) -> str | None:
    code = f"from {__name__} import import_here; import_here()"
    command = [sys.executable, "-c", code, entry.kind, json.dumps(asdict(entry.plugin))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return f"its import did not end within {timeout_s:g} s"
        out.seek(0)
        err.seek(0)
        printed, told = (stream.read().decode(errors="replace").strip() for stream in (out, err))
    if child.returncode < 0:
        return f"its import killed the process with {signal.Signals(-child.returncode).name}"
    if child.returncode == 0 and printed.endswith(DONE):
        return None
    return told or f"its import ended the process with exit code {child.returncode}"


def import_here() -> None:
    """Runs in the child: argv is the kind and the PluginId."""
    from ..registry.check import check_class
    from ..registry.importing import import_target

    kind, plugin = sys.argv[1], PluginId(**json.loads(sys.argv[2]))
    try:
        found = import_target(plugin, kind.removesuffix("s"))
        if kind == "proposers":
            check_class(found, plugin)
    except SpecdecError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(DONE)
