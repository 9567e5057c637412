"""Drafters in another process, inside both of vLLM's model runners: drafts as in one process, and equal text always."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from drafter_servers import served
from vllm_process import VllmProcess, job_of, with_interpreted_triton

from specdec import LLM, SamplingParams
from specdec.sdk.packaged import packaged

pytestmark = pytest.mark.full

SHARED = "a drafter that a server runs"
OWN = "a drafter in a process of its own"
ENDS_ONCE = "adapter_proposers:EndsOnce"


def isolated(method="ngram", **options):
    return {"method": method, "proposer_config": options, "isolation": "process"}


def remote(address):
    return {"method": "remote", "proposer_config": {"address": address}}


@pytest.fixture(scope="module", params=["V1", "V2"])
def vllm(request, tmp_path_factory, vllm_target, batch):
    """One of the runners: `run` as `job_of` and run_vllm.py say."""
    engine, more = {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if request.param == "V2":
        engine = {"block_size": 32, "async_scheduling": False}
        more = with_interpreted_triton(tmp_path_factory.mktemp("site"))
    kept = VllmProcess(tmp_path_factory.mktemp("vllm") / "log", **more)

    def run(specdec=None, **kwargs):
        directory = tmp_path_factory.mktemp("run")
        job = job_of(vllm_target, batch, specdec and "Configured", specdec=specdec, **engine | kwargs)
        if "tensor_parallel_size" not in kwargs:
            return checked(kept.run(job, directory))
        alone = VllmProcess(directory / "log", in_process=False, **more)
        try:
            return checked(alone.run(job, directory))
        finally:
            alone.close()

    def checked(found):
        assert found["error"] is None, found["error"] + found["log"][-4000:]
        assert found["v2"] == (request.param == "V2")
        return found

    yield SimpleNamespace(run=run, name=request.param)
    kept.close()


@pytest.fixture(scope="module")
def plain(vllm):
    """What this runner generates without drafts."""
    return vllm.run()["outputs"][0]


@pytest.fixture
def record(shown, vllm):
    """Note what a run showed."""

    def note(run, *capabilities):
        workers = [(report["pid"], report["propose_calls"]) for report in run["reports"]]
        shown(f"vLLM {run['version'].partition('+')[0]}, {vllm.name}, CPU", *capabilities, workers=workers)

    return note


@pytest.fixture(scope="module")
def in_the_core(batch):
    """Accepted n-gram drafts of our own engine, in one process."""
    config = {"method": "ngram", "num_speculative_tokens": 4}
    with LLM("tiny", speculative_config=config, max_model_len=512, max_num_seqs=8) as llm:
        llm.generate([{"prompt_token_ids": ids} for ids in batch], SamplingParams(temperature=0, max_tokens=48))
        return llm.engine.metrics.acceptance.num_accepted_tokens


def accepted(run):
    return run["reports"][0]["num_accepted_draft_tokens"]


@contextmanager
def server(address, method="ngram", **options):
    """A server's process."""
    with served(method, address, proposer_config=options) as (process, there):
        assert there == address
        yield process


def test_a_process_of_its_own_drafts_as_one_process_does(vllm, plain, in_the_core, record):
    run = vllm.run(isolated())
    assert run["outputs"][0] == plain
    assert accepted(run) == in_the_core
    record(run, OWN)


def test_a_head_in_a_process_of_its_own_drafts_as_one_process_does(vllm, plain, record):
    head = {"method": "eagle3", "model": str(packaged("tiny/eagle3"))}
    runs = [vllm.run(head | more, enable_prefix_caching=False) for more in ({}, {"isolation": "process"})]
    assert [run["outputs"][0] for run in runs] == [plain, plain]
    assert accepted(runs[0]) == accepted(runs[1]) > 0
    record(runs[1], OWN)


def test_a_server_drafts_as_one_process_does(vllm, plain, in_the_core, record, tmp_path):
    with server(address := f"ipc://{tmp_path}/socket"):
        run = vllm.run(remote(address))
    assert run["outputs"][0] == plain
    assert accepted(run) == in_the_core
    record(run, SHARED)


def figures(run):
    """The sums of all workers."""
    told = [report["figures"] for report in run["reports"]]
    return {name: sum(each[name] for each in told) for name in told[0]}


def test_a_process_that_is_killed_costs_drafts_until_it_is_back_also_one_of_two_workers(
    vllm, plain, batch, in_the_core, record, tmp_path
):
    """Of one worker, or of both: the first one's drafts are verified."""
    (file := tmp_path / "ends").touch()
    ends = isolated(ENDS_ONCE, file=str(file))
    run = vllm.run(ends, batches=[batch, batch], awaits_drafter=True, tensor_parallel_size=2)
    assert run["outputs"] == [plain, plain]
    assert in_the_core <= accepted(run) <= 2 * in_the_core
    assert 1 <= figures(run)["restarts"] == figures(run)["returns"] <= len(run["reports"]) == 2
    record(run, OWN, "two tensor-parallel workers")


def test_a_server_that_is_killed_costs_drafts_until_another_is_there(vllm, plain, batch, in_the_core, record, tmp_path):
    (file := tmp_path / "ends").touch()
    address = f"ipc://{tmp_path}/socket"
    with ExitStack() as first, ExitStack() as second:
        process = first.enter_context(server(address, ENDS_ONCE, file=str(file)))

        def follow():
            process.wait()
            second.enter_context(server(address))

        following = threading.Thread(target=follow)
        following.start()
        run = vllm.run(remote(address), batches=[batch, batch], awaits_drafter=True)
        following.join()
    assert run["outputs"] == [plain, plain]
    assert in_the_core <= accepted(run) < 2 * in_the_core
    assert figures(run)["outages"] == figures(run)["returns"] == 1
    record(run, SHARED)


def test_drafts_are_drawn_in_a_process_of_its_own_as_in_one_process(vllm, tiny_drafter):
    itself = {"method": "draft_model", "model": tiny_drafter("draft_model")}
    drawn = {"draft_sample_method": "probabilistic"}
    sampling = {"temperature": 0.8, "seed": 7, "max_tokens": 32}
    here, elsewhere = (
        vllm.run(itself | where, sampling=sampling, speculative=drawn, enable_prefix_caching=False)
        for where in ({}, {"isolation": "process"})
    )
    assert elsewhere["outputs"] == here["outputs"]
    assert accepted(elsewhere) == accepted(here) > 0
