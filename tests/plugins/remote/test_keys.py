"""Keys: who has one that fits is served over any address, and nobody else is."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from drafter_servers import Client, hosted_with, serving
from typer.testing import CliRunner

from specdec import LLM, SamplingParams
from specdec.cli._app import build_app
from specdec.sdk import ConfigError
from specdec.sdk.addresses import require_private
from specdec.sdk.keys import make_keys, read_client_key, read_server_key

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture
def keys(tmp_path) -> tuple[Path, Path]:
    path = tmp_path / "drafter.key"
    return path, make_keys(path)


def remote(address, **options):
    options = {"address": address, "start_seconds": 5, **options}
    return {"method": "remote", "num_speculative_tokens": 4, "proposer_config": options}


def test_both_files_are_their_owners_and_belong_together(keys) -> None:
    server, client = read_server_key(keys[0]), read_client_key(keys[1])
    assert [stat.S_IMODE(path.stat().st_mode) for path in keys] == [0o600, 0o600]
    assert (client.server, server.client) == (server.public, client.public)
    assert len({*server, *client}) == 4


def test_a_key_is_never_written_over(keys) -> None:
    before = keys[0].read_text()
    with pytest.raises(ConfigError, match=r"SD-E337[\s\S]*exists"):
        make_keys(keys[0])
    assert keys[0].read_text() == before


def test_what_is_no_key_is_refused(keys, tmp_path) -> None:
    other = tmp_path / "other"
    one, damaged = read_server_key(keys[0]).public, []
    for wrong in (one[:-1] + "~", one[:-1] + "é", one[:-5] + "#####", one[:-1]):
        damaged.append(keys[0].read_text().replace(one, wrong))
    for text in ("", "{}", "[]", '{"public": 1, "secret": 2, "client": 3}', *damaged):
        other.write_text(text, encoding="utf-8")
        other.chmod(0o600)
        with pytest.raises(ConfigError, match="SD-E337"):
            read_server_key(other)
    with pytest.raises(ConfigError, match="SD-E337"):
        read_client_key(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="where the server's belongs"):
        read_server_key(keys[1])
    with pytest.raises(ConfigError, match=r"where that of clients \(.client\) belongs"):
        read_client_key(keys[0])
    keys[0].chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        read_server_key(keys[0])


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5570", "tcp://drafter.example:5570", "tcp://*:5570", "tcp://[::]:1"]
)
def test_an_address_of_the_network_needs_a_key(address) -> None:
    require_private(address, has_key=True)
    with pytest.raises(ConfigError, match=r"SD-E333[\s\S]*--new-key"):
        require_private(address)


@pytest.mark.parametrize("address", ["ipc://@name", "here", "tcp://", "inproc://a", "udp://1.2.3.4:5", "tcp://a b:1"])
def test_no_key_makes_an_address_of_what_is_none(address) -> None:
    with pytest.raises(ConfigError, match="SD-E333"):
        require_private(address, has_key=True)


def test_who_has_the_key_is_served(keys) -> None:
    [plain] = LLM("tiny").generate("import os", GREEDY)
    with serving(hosted_with(NGRAM), "tcp://0.0.0.0:*", key=read_server_key(keys[0])) as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        llm = LLM("tiny", speculative_config=remote(address, key=str(keys[1])))
        [output] = llm.generate("import os", GREEDY)
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.outputs[0].spec_decode_metrics["num_accepted_draft_tokens"] > 0
        llm.close()


def test_who_has_none_or_another_is_not(keys, tmp_path) -> None:
    other = make_keys(tmp_path / "other.key")
    stranger = tmp_path / "stranger"  # knows the server, and is not known
    mine, theirs = read_client_key(other), read_client_key(keys[1])
    stranger.write_text(other.read_text().replace(mine.server, theirs.server))
    stranger.chmod(0o600)
    with serving(hosted_with(NGRAM), "tcp://127.0.0.1:*", key=read_server_key(keys[0])) as server:
        for path in (stranger, other):
            with pytest.raises(ConfigError, match="SD-E334") as raised:
                LLM("tiny", speculative_config=remote(server.address, key=str(path), start_seconds=1))
            if path == stranger:
                assert "the keys of the two sides do not fit" in str(raised.value)
        with Client(server.address) as plain:
            plain.socket.linger = 0
            plain.say(b"x")
            assert plain.hear(0.3) is None
        with Client(server.address) as good:
            assert good.hear(0) is None
        llm = LLM("tiny", speculative_config=remote(server.address, key=str(keys[1])))
        llm.close()


def test_a_client_with_a_key_does_not_speak_to_a_server_without(keys, tmp_path) -> None:
    with serving(hosted_with(NGRAM), "tcp://127.0.0.1:*") as server, pytest.raises(ConfigError, match="SD-E334"):
        LLM("tiny", speculative_config=remote(server.address, key=str(keys[1]), start_seconds=1))


def test_the_command_writes_keys_and_asks_for_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    done = runner.invoke(build_app(), ["serve-proposer", "--new-key", "drafter.key"])
    assert done.exit_code == 0, done.output
    assert "drafter.key.client" in done.output
    assert read_server_key(Path("drafter.key")).client == read_client_key(Path("drafter.key.client")).public
    done = runner.invoke(build_app(), ["serve-proposer", "ngram", "--target", "tiny", "--listen", "tcp://0.0.0.0:5570"])
    assert isinstance(done.exception, ConfigError) or "SD-E333" in done.output
