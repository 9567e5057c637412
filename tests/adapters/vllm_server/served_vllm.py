"""vLLM's own server with one of our proposers, in processes of its own on this machine's loopback."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from vllm_process import environment_of

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "run-in-vllm.md"
MODULE = "vllm.entrypoints.openai.api_server"
TIME_LIMIT = 400  # seconds until something that has to happen happened; a start takes some 30 on an idle machine
SMALL = {
    "--dtype": "float32",
    "--max-model-len": "512",
    "--max-num-seqs": "32",
    "--served-model-name": "tiny",
}


def documented():
    """The words of the first command of the how-to that starts a server, after the module's name."""
    blocks = re.findall(r"^```bash\n(.*?)^```", HOW_TO.read_text(), flags=re.MULTILINE | re.DOTALL)
    (words,) = [shlex.split(block.replace("\\\n", " ")) for block in blocks if MODULE in block][:1]
    assert words[:3] == ["python", "-m", MODULE]
    return words[3:]


def arguments(target, port, proposer=None, specdec=None):
    """The documented ones for a target and a port. `proposer`: another one, with its section of additional_config."""
    given = {"path/to/target": str(target), "8000": str(port)}
    words = [given.get(word, word) for word in documented()]
    if proposer is not None:
        chosen = {"model": f"specdec.adapters.vllm.{proposer}", "num_speculative_tokens": 4}
        words[words.index("--speculative-config") + 1] = json.dumps(chosen)
        words[words.index("--additional-config") + 1] = json.dumps({"specdec": specdec or {}})
    return [*words, "--enforce-eager", *chain(*SMALL.items())]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, what, alive=lambda: True):
    """The first true answer of `condition`. Fails if it has none within the limit, or if `alive` says no."""
    end = time.monotonic() + TIME_LIMIT
    while not (answer := condition()):
        assert alive(), f"the server ended before {what}"
        assert time.monotonic() < end, f"not in {TIME_LIMIT} seconds: {what}"
        time.sleep(0.2)
    return answer


class Server:
    """A server that runs. `log`: the file of everything that it prints."""

    def __init__(self, process, port, log):
        self._process, self.url, self.log_file = process, f"http://127.0.0.1:{port}", log

    @property
    def log(self):
        return self.log_file.read_text(errors="replace")

    def alive(self):
        return self._process.poll() is None

    def get(self, path):
        """The text of an answer; None while nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def until_logged(self, text):
        until(lambda: text in self.log, f"{text!r} in its log", self.alive)

    def metric(self, name, **labels):
        """The value of the sample with these labels among its own. None: it is not there."""
        from prometheus_client.parser import text_string_to_metric_families

        samples = [each for family in text_string_to_metric_families(self.get("/metrics")) for each in family.samples]
        found = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
        return found[0] if found else None

    def until_metric(self, name, condition, **labels):
        def holds():
            value = self.metric(name, **labels)
            return value is not None and condition(value)

        until(holds, f"{name}{labels}", self.alive)


@contextmanager
def serve(target, directory, proposer=None, specdec=None, path=(), **environment):
    """Start a server and wait until it is healthy. Whatever happens, none of its processes is left."""
    log, port = directory / "server.log", free_port()
    env = environment_of(False, path, {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "1"} | environment)
    with log.open("w") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *arguments(target, port, proposer, specdec)],
            env=env,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        until(lambda: server.get("/health") is not None or not server.alive(), "it was healthy")
        assert server.alive(), server.log[-4000:]
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def client_of(openai, server):
    """The one call that the tests need: a greedy completion. Other parameters as the client takes them."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    greedy = {"model": "tiny", "temperature": 0, "max_tokens": 32}
    return lambda prompt, **asked: client.completions.create(prompt=prompt, **greedy | asked)
