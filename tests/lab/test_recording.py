"""A recording holds what the target said, survives a kill and a full disk, and says what it is not."""

import errno
import json
import logging
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
from recordings import LAYERS, Quiet, make, settings, shared
from transformers import AutoModelForCausalLM

from specdec import LLM
from specdec.core.model.model_support import locate_model
from specdec.core.model.tokenizer import load_tokenizer
from specdec.core.registry import PluginSettings
from specdec.lab.recording import Cost, Manifest, RecordedRequest, Recording, RecordingWriter, shards, writer
from specdec.lab.recording.in_specdec import EngineSource
from specdec.lab.recording.recorder import record
from specdec.lab.recording.settings import RecordSettings
from specdec.lab.recording.writer import reserved
from specdec.sdk import ConfigError


def a_request(number: int, length: int = 3) -> RecordedRequest:
    return RecordedRequest(
        request_id=f"r{number}",
        number=number,
        prompt_id=f"r{number}",
        turn=0,
        category="c",
        prompt="é",
        text="t",
        seed=2**62,
        prompt_token_ids=(1, 2),
        token_ids=tuple(range(length)),
        past_token_ids=(7,),
        finish_reason="length",
        top_ids=torch.arange(2 * length).view(length, 2),
        top_logprobs=torch.rand(length, 2),
        token_logprobs=torch.rand(length),
        tail_mass=torch.rand(length),
        entropy=torch.rand(length),
    )


MANIFEST = Manifest(model="tiny", top_m=2)


def test_requests_are_read_as_they_were_written_in_the_order_of_their_numbers(tmp_path):
    first, second = a_request(1), a_request(0, length=5)
    hidden, logits = torch.rand(4, 8), torch.rand(3, 11)
    recorder = RecordingWriter(tmp_path / "x", MANIFEST)
    recorder.add(first, hidden, logits)
    recorder.flush()
    recorder.add(second)
    recorder.finish(cost=Cost(rows=(1, 3), seconds=(1.0, 2.0)))
    found = Recording.open(tmp_path / "x")
    assert [each.request_id for each in found] == ["r0", "r1"]
    for expected, read in zip((second, first), found, strict=True):
        for name, value in vars(expected).items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(getattr(read, name), value), name
    assert torch.equal(found.hidden_states("r1"), hidden)
    assert torch.equal(found.logits("r1"), logits)
    assert found.manifest.complete
    assert [found.manifest.cost.step_seconds(rows) for rows in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]


def test_what_was_not_recorded_is_named(tmp_path):
    recorder = RecordingWriter(tmp_path / "x", MANIFEST)
    recorder.add(a_request(0))
    recorder.finish()
    found = Recording.open(tmp_path / "x")
    for read in (found.hidden_states, found.logits):
        with pytest.raises(ConfigError, match="record again") as raised:
            read("r0")
        assert raised.value.code == "SD-E249"
    with pytest.raises(ConfigError) as raised:
        found.manifest.cost.step_seconds(1)
    assert raised.value.code == "SD-E252"


def test_probabilities_are_those_of_the_model(tmp_path):
    recording = make(tmp_path / "x", num_prompts=1, output_len=6, full_logits=True, top_m=4)
    model = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
    (request,) = recording
    ids = torch.tensor([[*request.prompt_token_ids, *request.token_ids]])
    with torch.inference_mode():
        probs = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].softmax(-1)
    top = probs.topk(4)
    assert torch.equal(request.top_ids, top.indices)
    assert torch.allclose(request.top_logprobs.exp(), top.values, atol=1e-5)
    assert torch.allclose(request.tail_mass, 1 - top.values.sum(-1), atol=1e-5)
    assert torch.allclose(request.entropy, torch.special.entr(probs).sum(-1), atol=1e-4)
    assert torch.allclose(recording.logits(request.request_id).softmax(-1), probs, atol=1e-5)
    assert request.token_ids == tuple(top.indices[:, 0].tolist())


def test_hidden_states_are_those_of_the_model():
    recording = shared()
    model = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
    request = next(iter(recording))
    ids = torch.tensor([[*request.prompt_token_ids, *request.token_ids]])
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states
    wanted = torch.cat([states[-1 if layer == "final" else layer][0] for layer in LAYERS], dim=1)
    recorded = recording.hidden_states(request.request_id)
    assert len(recorded) == len(request.prompt_token_ids) + len(request.token_ids) - 2
    assert torch.allclose(recorded, wanted[: len(recorded)], atol=1e-4)


def test_a_prompt_that_was_met_before_is_recorded_whole(tmp_path):
    """Where requests that begin alike share KV blocks, the first rows of later ones would be computed for none."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(json.dumps({"prompt": "x = 1\n" * 20}) + "\n" for _ in range(2)))
    asked = {
        "dataset_name": "custom",
        "dataset_path": prompts,
        "num_prompts": 2,
        "hidden_states": LAYERS,
        "output_len": 4,
    }
    recording = make(tmp_path / "x", max_num_seqs=1, **asked)
    first, second = (recording.hidden_states(each.request_id) for each in recording)
    assert torch.equal(first, second)


def test_states_that_nobody_asks_for_are_not_kept(tmp_path, monkeypatch):
    """Those past the end of a text, and those of the requests on which steps are timed."""
    ends = tuple({request.token_ids[4] for request in shared()})
    sampling = settings().sampling.replace(stop_token_ids=ends)
    monkeypatch.setattr(RecordSettings, "sampling", property(lambda self: sampling))
    sources = []

    def source(*arguments):
        sources.append(EngineSource(*arguments))
        return sources[0]

    asked = settings(hidden_states=LAYERS, num_prompts=2, measure_cost=True)
    record(asked, PluginSettings(), tmp_path / "x", Quiet(), source)
    recording = Recording.open(tmp_path / "x")
    assert all(each.past_token_ids for each in recording)
    assert recording.manifest.cost.rows
    assert not sources[0]._tap._states


def test_recorded_text_is_what_the_engine_generates():
    recording = shared()
    llm = LLM("tiny", device="cpu", max_num_seqs=2)
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in recording]
    live = [output.outputs[0].token_ids for output in llm.generate(prompts, settings().sampling)]
    assert [request.token_ids for request in recording] == live


def test_recording_goes_on_where_it_was_cut_short(tmp_path, monkeypatch):
    whole = make(tmp_path / "whole")
    folder = tmp_path / "cut"
    monkeypatch.setattr(writer, "SHARD_REQUESTS", 1)
    kept = RecordingWriter.add

    def killed_at_the_second(self, *request):
        if len(self.done) == 1:
            raise SystemExit
        kept(self, *request)

    monkeypatch.setattr(RecordingWriter, "add", killed_at_the_second)
    with pytest.raises(SystemExit):
        make(folder)
    monkeypatch.setattr(RecordingWriter, "add", kept)
    cut = Recording.open(folder)
    assert (len(cut), cut.manifest.complete) == (1, False)
    first = (folder / "shard-00000.parquet").read_bytes()
    resumed = make(folder)
    assert (folder / "shard-00000.parquet").read_bytes() == first
    assert resumed.manifest.complete
    assert [(each.request_id, each.token_ids) for each in resumed] == [(e.request_id, e.token_ids) for e in whole]


def test_a_torn_shard_is_dropped_with_a_word(tmp_path, caplog):
    recorder = RecordingWriter(tmp_path / "x", MANIFEST)
    recorder.add(a_request(0))
    recorder.flush()
    (tmp_path / "x" / "shard-00001.safetensors").write_bytes(b"half")
    (tmp_path / "x" / "shard-00001.parquet.tmp").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        resumed = RecordingWriter(tmp_path / "x", MANIFEST)
    assert caplog.text.count("SD-W243") == 2
    assert resumed.done == {"r0"}
    whole = ["manifest.json", "shard-00000.parquet", "shard-00000.sha256"]
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == whole


def test_a_full_disk_keeps_what_was_written_and_leaves_no_part(tmp_path, monkeypatch):
    recorder = RecordingWriter(tmp_path / "x", MANIFEST)
    recorder.add(a_request(0))
    recorder.flush()

    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    recorder.add(a_request(1), torch.rand(3, 8))
    with pytest.raises(ConfigError, match=r"(?s)No space left.*kept +1 request in 1 shard,") as raised:
        recorder.flush()
    assert raised.value.code == "SD-E248"
    assert not list((tmp_path / "x").glob("shard-00001*"))
    assert Recording.open(tmp_path / "x").request_ids == ["r0"]


def test_max_disk_ends_a_recording_that_can_be_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_REQUESTS", 1)
    with pytest.raises(ConfigError, match=r"the next shard has \d+ bytes, and max_disk leaves \d+") as raised:
        make(tmp_path / "x", max_disk=60_000, full_logits=False, top_m=200, output_len=20)
    assert raised.value.code == "SD-E248"
    assert sum(path.stat().st_size for path in (tmp_path / "x").glob("shard-*")) <= 60_000
    num_kept = len(Recording.open(tmp_path / "x"))
    assert 0 < num_kept < 3
    assert len(make(tmp_path / "x", top_m=200, output_len=20)) == 3


def test_another_recording_in_the_folder_is_refused(tmp_path):
    RecordingWriter(tmp_path / "x", MANIFEST).finish()
    with pytest.raises(ConfigError, match="another model, top_m") as raised:
        RecordingWriter(tmp_path / "x", Manifest(model="other", top_m=3))
    assert raised.value.code == "SD-E247"
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files") as raised:
        RecordingWriter(tmp_path / "y", MANIFEST)
    assert raised.value.code == "SD-E247"


def test_a_folder_takes_one_recording_at_a_time_and_outlives_a_killed_one(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from specdec.lab.recording.writer import reserved\n"
        "with reserved(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process records into it") as raised:
            record(settings(), PluginSettings(), tmp_path / "x", Quiet(), NeverLoaded)
        assert raised.value.code == "SD-E247"
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    with reserved(tmp_path / "x"):
        pass


def test_a_folder_goes_again_where_nothing_was_recorded(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("x", "mine"):
        with pytest.raises(AssertionError):
            record(settings(), PluginSettings(), tmp_path / name, Quiet(), NeverLoaded)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_ended_is_kept_where_a_later_request_fails(tmp_path, monkeypatch):
    kept = RecordingWriter.add

    def fails_at_the_second(self, *request):
        if self._requests:
            raise RuntimeError("of the engine")
        kept(self, *request)

    monkeypatch.setattr(RecordingWriter, "add", fails_at_the_second)
    with pytest.raises(RuntimeError, match="of the engine"):
        make(tmp_path / "x")
    assert len(Recording.open(tmp_path / "x")) == 1


@pytest.mark.parametrize(("limit", "said"), [(0, "large"), (20_000, "os error 27")])
def test_a_disk_that_is_full_at_the_tokenizer_is_named(tmp_path, limit, said):
    tokenizer = load_tokenizer(None, locate_model("tiny"), trust_remote_code=False)
    recorder = RecordingWriter(tmp_path / "x", MANIFEST)
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, earlier[0][1]))
    try:
        with pytest.raises(ConfigError, match=said) as raised:
            recorder.save_tokenizer(tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier[0])
        signal.signal(signal.SIGXFSZ, earlier[1])
    assert raised.value.code == "SD-E248"


def test_a_recording_is_gone_on_with_by_an_engine_that_gets_other_memory(tmp_path):
    def engine(**settings):
        return MANIFEST.replace(engine={"max_num_seqs": 2} | settings)

    RecordingWriter(tmp_path / "x", engine(num_kv_blocks=100)).flush()
    resumed = RecordingWriter(tmp_path / "x", engine(num_kv_blocks=90))
    assert resumed.finish().engine["num_kv_blocks"] == 100
    with pytest.raises(ConfigError, match="another engine"):
        RecordingWriter(tmp_path / "x", engine(num_kv_blocks=100, max_num_seqs=3))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "SD-E244"),
        ("{", "SD-E244"),
        ("[]", "SD-E244"),
        ('{"schema_name": "other", "schema_version": 1}', "SD-E244"),
        ('{"schema_name": "specdec.recording", "schema_version": 99, "new": 1}', "SD-E245"),
    ],
)
def test_what_is_no_recording_or_a_newer_one_is_named(tmp_path, text, code):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"fix") as raised:
        Recording.open(tmp_path)
    assert raised.value.code == code


def test_a_damaged_shard_is_named(tmp_path):
    recorder = RecordingWriter(tmp_path / "x", MANIFEST)
    recorder.add(a_request(0), torch.rand(4, 8))
    recorder.finish()
    for name, read in (("safetensors", lambda each: each.hidden_states("r0")), ("parquet", list)):
        (tmp_path / "x" / f"shard-00000.{name}").write_bytes(b"broken")
        with pytest.raises(ConfigError, match=rf"shard-00000\.{name} is damaged") as raised:
            read(Recording.open(tmp_path / "x"))
        assert raised.value.code == "SD-E244"


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"specdec-sdk\[lab\]") as raised:
        RecordingWriter(tmp_path / "x", MANIFEST)
    assert raised.value.code == "SD-E243"


def test_later_turns_go_on_from_the_replies(tmp_path):
    path = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 1, "category": "a", "turns": ["import os", "Now sys."]},
        {"question_id": 2, "category": "b", "turns": ["def f("]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording = make(tmp_path / "x", dataset_name="mt_bench", dataset_path=path, output_len=8, num_prompts=0)
    assert [(each.request_id, each.turn, each.prompt) for each in recording] == [
        ("1", 0, "import os"),
        ("2", 0, "def f("),
        ("1/2", 1, "Now sys."),
    ]
    first, _, second = recording
    said = [*first.prompt_token_ids, *first.token_ids]
    assert list(second.prompt_token_ids[: len(said)]) == said


@pytest.mark.full
def test_a_killed_process_leaves_a_recording_that_is_gone_on_with(tmp_path):
    folder = tmp_path / "x"
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from specdec.lab.recording import writer; writer.SHARD_REQUESTS = 1\n"
        "from pathlib import Path; from recordings import make\n"
        "make(Path(sys.argv[1]), num_prompts=0, output_len=100, hidden_states=(2, 4, 5))\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(__file__).rpartition("/")[0]]
    process = subprocess.Popen(command)
    while not (folder / "shard-00002.parquet").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(Recording.open(folder))
    assert kept >= 3
    resumed = make(folder, num_prompts=0, output_len=100, hidden_states=(2, 4, 5))
    assert len(resumed) > kept
    assert all(len(resumed.hidden_states(each.request_id)) for each in resumed)


@pytest.mark.slow
def test_a_recording_with_the_cost_of_steps_says_what_rows_cost(tmp_path):
    record(settings(num_prompts=1, measure_cost=True, output_len=4), PluginSettings(), tmp_path / "x", Quiet())
    cost = Recording.open(tmp_path / "x").manifest.cost
    assert {1, 2, 3, 5, 9, 17} <= set(cost.rows)
    assert all(seconds > 0 for seconds in cost.seconds)


class NeverLoaded:
    """A source that must not be made."""

    def __init__(self, *arguments):
        raise AssertionError("the target was loaded")


@pytest.mark.parametrize(("name", "code"), [("file", "SD-E187"), ("file/x", "SD-E187"), ("others", "SD-E247")])
def test_a_folder_that_cannot_hold_a_recording_is_refused_before_the_target_is_loaded(tmp_path, name, code):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match=r"because|holds other files") as raised:
        record(settings(), PluginSettings(), tmp_path / name, Quiet(), NeverLoaded)
    assert raised.value.code == code


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EDQUOT, "SD-E248"), (errno.EIO, "SD-E248"), (errno.EACCES, "SD-E187")]
)
def test_only_a_disk_without_room_is_said_to_have_none(tmp_path, monkeypatch, number, code):
    recorder = RecordingWriter(tmp_path / "x", MANIFEST)

    def refuses(tensors, path):
        raise OSError(number, "as the system says")

    monkeypatch.setattr(shards, "save_file", refuses)
    recorder.add(a_request(0), torch.rand(3, 8))
    with pytest.raises(ConfigError, match="as the system says") as raised:
        recorder.flush()
    assert raised.value.code == code
