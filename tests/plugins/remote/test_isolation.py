"""`"isolation": "process"`: the drafts, errors and figures of one process, and equal text however the process ends."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inside import proposer_of

from specdec import LLM, SamplingParams
from specdec.core.registry import PluginSettings
from specdec.plugins.remote.child import _import_path
from specdec.sdk import ConfigError, ProposerError, Refusal
from specdec.sdk.errors import PluginLoadError

PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def push(self, x):\n", "import os\nimport sys\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=48)
MODULE = "isolated_proposers"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
DRAWN = {"model": "tiny/draft", "num_speculative_tokens": 4} | PROBABILISTIC
SAMPLED = [
    SamplingParams(temperature=1, max_tokens=48, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, max_tokens=40, seed=2),
    SamplingParams(temperature=0, max_tokens=48, seed=3),
]


def mine(name, isolation="process", **options):
    config = {"method": f"{MODULE}:{name}", "num_speculative_tokens": 4, "proposer_config": options}
    return config if isolation is None else config | {"isolation": isolation}


def engine(config=None, **settings) -> LLM:
    return LLM("tiny", speculative_config=config, **settings)


def texts(llm, prompts=PROMPTS, params=GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def lengths(llm) -> list[float]:
    outputs = llm.generate(PROMPTS, GREEDY)
    return [output.outputs[0].spec_decode_metrics["mean_acceptance_length"] for output in outputs]


def sampled(llm, prompts=PROMPTS, params=SAMPLED) -> list[tuple[list[int], dict[str, float]]]:
    """Texts, and what became of their drafts."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(list(each.token_ids), each.spec_decode_metrics) for each in outputs]


def figures(llm) -> dict[str, float]:
    """By the name behind the proposer's."""
    metrics = [metric for metric in llm.get_metrics() if "_process_" in metric.name]
    return {metric.name.rpartition("_process_")[2]: metric.value for metric in metrics}


def processes_of(llm) -> tuple[int, list[int], Path]:
    """The keeper, what it forked, and their directory."""
    keeper = proposer_of(llm)._child._keeper
    pid = keeper._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pid, [int(each) for each in children], Path(keeper.directory)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition) -> None:
    """Processes end and start when they do; a test waits for it."""
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen")


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts(engine())


# What is refused, before anything starts


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SD-E132 nobody offers this isolation[\s\S]*'machine'"):
        engine(NGRAM | {"isolation": "machine"})


def test_a_blocked_plugin_offers_none() -> None:
    with pytest.raises(ConfigError, match="SD-E132 nobody offers"):
        engine(NGRAM | {"isolation": "process"}, plugin_settings=PluginSettings(allow=frozenset({"ngram"})))


@pytest.mark.parametrize(
    ("isolation", "found"),
    [
        ({"kind": "process", "memory": 5}, "did you mean 'memory_mib'"),
        ({"kind": "process", "memory_mib": 0}, "memory_mib"),
        ({"kind": "process", "deadline_ms": -1}, "deadline_ms"),
        ({"kind": "process", "start_seconds": 3e6}, "start_seconds"),
    ],
)
def test_its_options_are_checked(isolation, found) -> None:
    with pytest.raises(ConfigError, match=found):
        engine(NGRAM | {"isolation": isolation})


def test_a_process_gets_the_import_path_without_what_is_none(monkeypatch) -> None:
    known = ["", *sys.path]
    monkeypatch.setattr(sys, "path", [*known, Path("/skipped"), os.fsdecode(b"/no-utf-8-\xff"), None])
    assert _import_path() == known


def test_a_proposer_that_reads_the_target_is_refused() -> None:
    with pytest.raises(Refusal, match="target_tokens"):
        engine(mine("ReadsLikelyTokens"))


def test_drawn_drafts_with_a_deadline_are_refused() -> None:
    with pytest.raises(Refusal, match=r'no deadline_ms, or "draft_sample_method": "greedy"'):
        engine(DRAWN | {"isolation": {"kind": "process", "deadline_ms": 5}})


def test_drawn_drafts_of_a_proposer_that_reports_none_are_refused_as_in_one_process() -> None:
    for isolation in ({}, {"isolation": "process"}):
        with pytest.raises(Refusal, match="this proposer reports no distribution of its drafts"):
            engine(NGRAM | {"draft_sample_method": "probabilistic"} | isolation)


def test_a_wrong_option_of_the_proposer_is_said_as_in_one_process() -> None:
    with pytest.raises(ConfigError) as apart:
        engine(mine("Ends", hov="exit"))
    with pytest.raises(ConfigError) as inside:
        engine(mine("Ends", None, hov="exit"))
    assert str(apart.value) == str(inside.value)


@pytest.mark.full
def test_missing_libraries_are_asked_for_by_name() -> None:
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'zmq' else real(name, *a)\n"
        "from specdec import LLM\n"
        "LLM('tiny', speculative_config={'method': 'ngram', 'num_speculative_tokens': 2, 'isolation': 'process'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "SD-E330 pyzmq is not installed" in done.stderr
    assert 'pip install "specdec-sdk[remote]"' in done.stderr


@pytest.mark.full
def test_a_class_of_the_script_itself_is_refused(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from specdec import LLM\n"
        "class Mine:\n"
        "    def __init__(self, config): ...\n"
        "    def propose(self, step): ...\n"
        "LLM('tiny', speculative_config={'method': '__main__:Mine', 'num_speculative_tokens': 2,"
        " 'isolation': 'process'})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert "another process cannot import __main__:Mine" in done.stderr
    assert "a module of its own" in done.stderr


# As in one process


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        NGRAM,
        {"model": "tiny/draft", "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 4, "max_nodes": 8},
        mine("Both", None),
        {"model": f"{MODULE}.LooksUp", "num_speculative_tokens": 3},
    ],
    ids=["ngram", "draft_model", "tree", "combinator", "class"],
)
def test_drafts_and_text_are_those_of_one_process(config, plain) -> None:
    llm = engine(config | {"isolation": "process"})
    assert texts(llm) == plain
    if "max_nodes" not in config:
        assert lengths(llm) == lengths(engine(config))
    assert figures(llm)["in_time"] > 0
    llm.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        DRAWN,
        DRAWN | {"proposer_config": {"draft_distribution": "dense"}},
        mine("Draws", None, kind="DENSE_PROBS", own_vocabulary=True) | PROBABILISTIC,
    ],
    ids=["sparse", "dense", "own_vocabulary"],
)
def test_drawn_drafts_and_what_becomes_of_them_are_those_of_one_process(config) -> None:
    """Bit for bit: with its seeds, what is accepted is the same at every place."""
    llm = engine(config | {"isolation": "process"})
    found = sampled(llm)
    assert found == sampled(engine(config))
    assert sum(each["num_accepted_draft_tokens"] for _, each in found) > 0
    llm.close()


@pytest.mark.full
def test_a_process_that_is_killed_draws_the_same_drafts_when_it_is_back() -> None:
    llm = engine(mine("Draws", kind="SPARSE") | PROBABILISTIC)
    found, (_, [child], _) = sampled(llm), processes_of(llm)
    os.kill(child, signal.SIGKILL)
    until(lambda: not is_alive(child))
    until(lambda: sampled(llm) and figures(llm)["up"])
    assert sampled(llm) == found
    assert figures(llm)["restarts"] == 1
    llm.close()


@pytest.mark.full
def test_drawn_trees_are_served_as_the_paths_that_are_drawn_first() -> None:
    llm = engine(DRAWN | {"max_nodes": 6, "isolation": "process"})
    assert sum(each["num_accepted_draft_tokens"] for _, each in sampled(llm)) > 0
    llm.close()


@pytest.mark.full
def test_figures_and_labels_are_the_proposers(plain) -> None:
    llm, inside = engine(mine("LooksUp")), engine(mine("LooksUp", None))
    texts(llm), texts(inside)
    names, others = ({metric.name for metric in each.get_metrics()} for each in (llm, inside))
    assert {name for name in names if "_process_" not in name} == others
    assert "specdec:proposer_looksup_looked" in names
    assert figures(llm)["restarts"] == 0
    llm.close()


@pytest.mark.full
def test_an_error_is_that_of_one_process_with_its_line_and_traceback(plain) -> None:
    llm, inside = (engine(mine("Ends", each, how="raises")) for each in ("process", None))
    errors = []
    for each in (llm, inside):
        with pytest.raises(ProposerError) as raised:
            texts(each)
        errors.append(raised.value)
    there, here = errors
    assert (there.code, there.summary, there.plugin) == (here.code, here.summary, here.plugin)
    assert there.facts == here.facts
    assert "isolated_proposers.py" in str(there.facts["where"])
    assert "in fails\n" in str(there.__cause__)
    assert "ValueError: in the other process" in str(there.__cause__)
    llm.close()


@pytest.mark.full
def test_errors_follow_the_policy(plain) -> None:
    llm = engine(mine("Ends", how="raises") | {"on_proposer_error": "skip_step"})
    assert texts(llm) == plain
    assert figures(llm)["errors"] == 1
    assert figures(llm)["restarts"] == 0
    llm.close()


@pytest.mark.full
def test_an_error_of_its_constructor_stops_the_start_as_in_one_process() -> None:
    errors = []
    for isolation in ("process", None):
        with pytest.raises(PluginLoadError) as raised:
            engine(mine("Ends", isolation, how="raises", step=0))
        errors.append(raised.value)
    assert [each.code for each in errors] == ["SD-E116", "SD-E116"]
    assert errors[0].facts["where"] == errors[1].facts["where"]


@pytest.mark.full
def test_such_an_error_may_be_longer_than_a_pipe_holds() -> None:
    with pytest.raises(PluginLoadError, match="SD-E116"):
        engine(mine("Ends", how="raises_at_length", step=0))


@pytest.mark.full
@pytest.mark.parametrize(("how", "found"), [("status", "with exit status 3"), ("segfault", "by SIGSEGV")])
def test_a_process_that_ends_at_the_start_is_named(how, found) -> None:
    with pytest.raises(ProposerError, match=f"SD-E335[\\s\\S]*{found}, in constructing the proposer of {MODULE}"):
        engine(mine("Ends", how=how, step=0))


@pytest.mark.full
def test_a_process_that_never_starts_is_ended() -> None:
    with pytest.raises(ProposerError, match=r"did not listen within 30 s[\s\S]*in forever"):
        engine(mine("Ends", {"kind": "process", "start_seconds": 30}, how="hangs", step=0))


@pytest.mark.full
def test_its_state_is_saved_and_loaded_also_by_the_next_process(tmp_path, plain, monkeypatch) -> None:
    config = mine("Learns") | {"state_dir": str(tmp_path / "state")}
    name = "specdec:proposer_learns_seen"
    seen = []
    for _ in range(2):
        llm = engine(config)
        assert texts(llm) == plain
        seen.append(next(metric.value for metric in llm.get_metrics() if metric.name == name))
        _, [child], _ = processes_of(llm)
        llm.close()
    assert seen[1] == 2 * seen[0] > 0
    llm = engine(config)
    monkeypatch.chdir(tmp_path)  # the process stays where it was started
    llm.save_proposer_state("state")  # what was loaded is gone
    _, [child], _ = processes_of(llm)
    os.kill(child, signal.SIGKILL)
    until(lambda: not is_alive(child))
    until(lambda: texts(llm) == plain and figures(llm)["up"])
    assert next(metric.value for metric in llm.get_metrics() if metric.name == name) >= 2 * seen[0]
    assert figures(llm)["errors"] == 0
    llm.close()


# However it ends


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "status", "segfault", "killed", "stopped", "hangs", "prints"])
def test_text_is_equal_however_it_ends_and_drafts_come_back(how, plain, caplog) -> None:
    llm = engine(mine("Ends", {"kind": "process", "hang_seconds": 0.4}, how=how, step=6))
    for _ in range(3):
        assert texts(llm) == plain
    if how == "prints":
        assert figures(llm)["restarts"] == 0
    else:
        until(lambda: texts(llm) == plain and figures(llm)["returns"] >= 2)
        assert figures(llm)["restarts"] >= 2
        [warning, *_] = [each.getMessage() for each in caplog.records if "SD-W331" in each.getMessage()]
        assert f"the process of {MODULE}:Ends is lost" in warning
        assert f"in propose of {MODULE}:Ends" in warning
    if how in ("segfault", "hangs"):
        assert "isolated_proposers.py" in warning
    llm.close()


@pytest.mark.full
def test_what_is_beyond_its_memory_is_an_error_of_the_proposer(plain) -> None:
    llm = engine(mine("Ends", {"kind": "process", "memory_mib": 1024}, how="too_much"))
    with pytest.raises(ProposerError, match=r"allocate memory[\s\S]*limit +memory_mib: 1024"):
        texts(llm)
    assert texts(llm) == plain
    llm.close()


@pytest.mark.full
def test_so_it_is_in_its_constructor() -> None:
    with pytest.raises(PluginLoadError, match=r"SD-E116[\s\S]*allocate memory[\s\S]*limit +memory_mib: 1024"):
        engine(mine("Ends", {"kind": "process", "memory_mib": 1024}, how="too_much", step=0))


@pytest.mark.full
def test_the_end_of_a_process_that_has_a_limit_names_it(plain, caplog) -> None:
    llm = engine(mine("Ends", {"kind": "process", "memory_mib": 4096}, how="aborts"))
    assert texts(llm) == plain
    assert f"by SIGABRT, in propose of {MODULE}:Ends; memory_mib: 4096 is its limit" in caplog.text
    llm.close()


@pytest.mark.full
def test_a_keeper_that_is_killed_is_started_again_and_nothing_of_it_is_left(plain) -> None:
    llm = engine(NGRAM | {"isolation": "process"})
    pid, [child], directory = processes_of(llm)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(child))
    assert texts(llm) == plain
    until(lambda: texts(llm) == plain and figures(llm)["returns"] == 1)
    assert not directory.exists()
    llm.close()


@pytest.mark.full
def test_an_engine_that_is_forgotten_leaves_nothing() -> None:
    llm = engine(NGRAM | {"isolation": "process"})
    pid, children, directory = processes_of(llm)
    del llm
    gc.collect()
    until(lambda: not any(map(is_alive, [pid, *children])) and not directory.exists())


ENGINE = """
import json, sys, time
sys.path[:0] = {paths}
from inside import proposer_of
from specdec import LLM
llm = LLM("tiny", speculative_config={config})
keeper = proposer_of(llm)._child._keeper
pid = keeper._process.pid
children = open(f"/proc/{{pid}}/task/{{pid}}/children").read().split()
print(json.dumps([pid, *map(int, children), keeper.directory]), flush=True)
{then}
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "send"),
    [*((each, os.kill) for each in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None)), (signal.SIGTERM, os.killpg)],
    ids=str,
)
def test_nothing_is_left_when_its_engines_process_ends(number, send) -> None:
    """Also where its keeper is sent the same signal: a supervisor ends a whole group."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "helpers")]
    config = mine("Ends", how="hangs", step=1) if number else NGRAM | {"isolation": "process"}
    then = "llm.generate('import os')" if number == signal.SIGKILL else "time.sleep(100)" if number else ""
    code = ENGINE.format(paths=paths, config=config, then=then)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    parent = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
    assert parent.stdout is not None
    *pids, directory = json.loads(parent.stdout.readline())
    assert len(pids) == 2
    if number:
        time.sleep(0.5 if number == signal.SIGKILL else 0)  # it is within the call that hangs
        send(parent.pid, number)
    parent.wait(30)
    until(lambda: not any(map(is_alive, pids)) and not Path(directory).exists())
    parent.stdout.close()
