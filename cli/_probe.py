"""Import a plugin in a process of its own, so that even a crash or a hang of its import is only a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from specdec.core.registry.discovery import PluginEntry, noun_of
from specdec.sdk import SpecdecError

TIMEOUT_S = 20.0
MOST_SAID = 800  # characters of what a dying process wrote last


def probe(entry: PluginEntry, timeout_s: float = TIMEOUT_S) -> PluginEntry:
    """The entry, marked broken with the reason if it cannot be imported, or used as what it is offered as."""
    if entry.status not in ("ok", "duplicate"):
        return entry
    with TemporaryDirectory() as folder:
        verdict, chatter = Path(folder, "verdict.json"), Path(folder, "chatter")
        died = _import_elsewhere(entry, verdict, chatter, timeout_s)
        found = {"code": "SD-E103", "reason": died} if died else json.loads(verdict.read_text(encoding="utf-8"))
    return replace(entry, status="broken", **found) if found["reason"] else entry


def _import_elsewhere(entry: PluginEntry, verdict: Path, chatter: Path, timeout_s: float) -> str | None:
    """Run `import_here` in a child whose descendants end with it. Returns why there is no verdict, or None."""
    command = [sys.executable, "-c", f"from {__name__} import import_here; import_here()"]
    command += [json.dumps(asdict(entry)), str(verdict)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with chatter.open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
        )
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"its import did not end within {timeout_s:g} s"
        finally:
            _end(child)
    if child.returncode < 0:
        return f"its import killed the process with {signal.Signals(-child.returncode).name}"
    if verdict.exists():
        return None
    said = chatter.read_text(encoding="utf-8", errors="replace").strip()[-MOST_SAID:]
    return f"its import ended the process with exit code {child.returncode}" + (f": {said}" if said else "")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what still runs of the child and of those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def import_here() -> None:
    """Runs in the child: argv is the entry and where to write the verdict."""
    entry, verdict = PluginEntry(**json.loads(sys.argv[1])), Path(sys.argv[2])
    verdict.write_text(json.dumps(_verified(replace(entry, status="ok"))), encoding="utf-8")


def _verified(entry: PluginEntry) -> dict[str, str | None]:
    """Code and reason of what is wrong with it; both None if nothing is."""
    from specdec.core.registry.functions import import_function
    from specdec.core.registry.hooks import HookPlugins
    from specdec.core.registry.importing import import_target
    from specdec.sdk.check import check_class

    if entry.kind == "plugins":
        (row,) = HookPlugins((entry,)).entries
        return {"code": row.code, "reason": row.reason} if row.status != "ok" else _FINE
    try:
        if entry.kind == "proposers":
            check_class(import_target(entry.plugin), entry.plugin)
        else:
            import_function(entry.plugin, noun_of(entry.kind))
    except SpecdecError as error:
        return {"code": error.code, "reason": str(error)}
    return _FINE


_FINE: dict[str, str | None] = {"code": None, "reason": None}
