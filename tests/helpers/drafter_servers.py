"""A server on a thread of the tests' process or in one of its own, and a client that speaks to it in plain messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import zmq

from specdec.adapters.serving.hosted import Hosted, served_speculation
from specdec.adapters.serving.server import Server
from specdec.adapters.serving.sessions import Limits
from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.plan import Plan
from specdec.core.registry import PluginSettings
from specdec.sdk.wire import PROTOCOL, Hello, at_client, encode

NUMBERS = count()


def hosted_with(config, max_num_seqs=8, ahead=0, torch_compile=False, **facts) -> Hosted:
    """A proposer without an engine, for the packaged target; `facts`: in which another differs from it."""
    settings = PluginSettings.from_environment({})
    plan = Plan.make(EngineConfig(model="tiny", device="cpu", max_num_seqs=max_num_seqs), None, settings)
    info = replace(plan.info, **facts)
    speculation = served_speculation(config, info, settings, plan.hooks, ahead)
    return Hosted(info, speculation, plan.hooks.observers, None, ahead, torch_compile=torch_compile)


@contextmanager
def serving(hosted, address, limits=None, clock=None, **options) -> Iterator[Server]:
    """It is served inside."""
    more = {} if clock is None else {"clock": clock}
    server = Server(hosted, address, limits or Limits(), **more, **options)
    reading, writing = os.pipe()
    thread = threading.Thread(target=server.serve, args=(reading,))
    thread.start()
    try:
        yield server
    finally:
        os.write(writing, b"!")
        thread.join()
        server.close()
        os.close(reading)
        os.close(writing)


@contextmanager
def served(proposer, listen, **config):
    """A process that finds what this one does, and its address."""
    command = [sys.executable, "-m", "specdec", "serve-proposer", proposer, "--target", "tiny", "--listen", listen]
    asked = json.dumps({"num_speculative_tokens": 4} | config)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "-sc", asked], env=environment, **pipes) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().rpartition(" at ")[2].strip()
        finally:
            process.kill()


def inner(process) -> int:
    """The process that serves: the command's own waits for it."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


class Client:
    """Whoever reaches the socket."""

    def __init__(self, address: str, **options: int) -> None:
        """options: of the socket."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(address)

    def say(self, said) -> None:
        self.socket.send(said if isinstance(said, bytes) else encode(said))

    def hear(self, seconds=10.0):
        """The next message; None: nothing came."""
        if not self.socket.poll(int(1000 * seconds)):
            return None
        return at_client(self.socket.recv())

    def hello(self, **changes):
        facts = {"protocol": PROTOCOL, "vocab_size": 4096, "max_model_len": 512, "num_draft_tokens": 4}
        self.say(Hello(**facts | changes))
        return self.hear()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        with suppress(zmq.ZMQError):
            self._context.destroy(linger=0)
