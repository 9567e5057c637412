"""Servers as the how-to starts them. They need vLLM and openai, which `.ci/engines` installs."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served_vllm import client_of, serve


@pytest.fixture(scope="session")
def openai():
    """The client's package."""
    return pytest.importorskip("openai", reason="openai is not installed here; .ci/engines installs it and runs this")


@pytest.fixture(scope="session")
def started(vllm_target, tmp_path_factory):
    """Start a server that is stopped at the end of the session."""
    with ExitStack() as servers:
        yield lambda *args, **kw: servers.enter_context(serve(vllm_target, tmp_path_factory.mktemp("s"), *args, **kw))


@pytest.fixture(scope="session")
def documented_server(started):
    """As the how-to writes it, with a small target."""
    return started()


@pytest.fixture
def ask(openai, documented_server):
    """Completions of the documented server."""
    return client_of(openai, documented_server)
