import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from specdec.cli import _checks
from specdec.cli._app import build_app
from specdec.cli._probe import probe
from specdec.core.engine import device
from specdec.core.registry import PluginSettings
from specdec.core.registry.discovery import PluginEntry

ECHO = '''
from specdec.sdk import Needs, StrictModel
from pydantic import Field

class Echo:
    """Drafts the newest token again.

    More about it.
    """

    api_version = "1.0"
    needs = Needs(history=True)

    class Options(StrictModel):
        window: int = Field(4, ge=1, description="tokens looked at")
        corpus: str

    def __init__(self, config): ...
    def propose(self, step): ...
    def on_finish(self, request): ...
'''


def rows(finished, name=None):
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    return [row for row in found if name in (None, row["name"])]


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "--json"], ["info", "--help"]])
def test_command_loads_no_torch(site, tmp_path, arguments):
    code = (
        "import sys\n"
        "from specdec.cli._app import main\n"
        f"sys.argv = ['specdec', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


def test_list_shows_proposers_and_plugins_without_importing_them(specdec, install):
    install(
        "dist-x",
        "1.2",
        ["echo = x_mod:Echo"],
        ["hooks = x_mod"],
        module="x_mod",
        source="raise RuntimeError('imported')",
    )
    finished = specdec("list", "--json")
    (echo,) = rows(finished, "echo")
    assert echo == {
        "name": "echo",
        "kind": "proposers",
        "status": "ok",
        "distribution": "dist-x",
        "version": "1.2",
        "target": "x_mod:Echo",
        "reason": None,
    }
    assert rows(finished, "hooks")[0]["kind"] == "plugins"


def test_list_shows_broken_and_duplicate_rows_with_the_reason(specdec, install):
    install("dist-x", proposers=["echo = x_mod:Echo", "odd = not a path"])
    install("dist-y", proposers=["echo = y_mod:Echo"])
    finished = specdec("list", "--json")
    assert [row["status"] for row in rows(finished, "echo")] == ["duplicate", "duplicate"]
    (odd,) = rows(finished, "odd")
    assert odd["status"] == "broken"
    assert "not a path" in odd["reason"]


def test_blocked_rows_are_counted_and_shown_by_all(specdec, install):
    install("dist-x", proposers=["echo = x_mod:Echo"])
    finished = specdec("-p", "no:echo", "list")
    assert "dist-x\t" not in finished.stdout
    assert "1 blocked, shown by --all: dist-x:echo" in finished.stderr
    (echo,) = rows(specdec("-p", "no:echo", "list", "--all", "--json"), "echo")
    assert echo["status"] == "blocked"


@pytest.mark.parametrize(
    ("flags", "environment", "usable"),
    [
        ([], {}, {"echo", "other"}),
        (["--plugins", "echo"], {}, {"echo"}),
        (["--plugins", "echo"], {"SPECDEC_PLUGINS": "other"}, {"echo"}),
        (["--no-plugins"], {}, set()),
        ([], {"SPECDEC_PLUGINS": ""}, set()),
        (["-p", "no:echo"], {"SPECDEC_DISABLE_PLUGINS": "dist-x:other"}, set()),
        ([], {"SPECDEC_DISABLE_PLUGINS": "Dist_X"}, set()),
        (["--plugins", "dist-x", "-p", "no:dist-x:echo"], {}, {"other"}),
        (["-p", "no:echo", "--plugins", "echo,other"], {}, {"other"}),
    ],
)
def test_flags_and_environment_choose_plugins(specdec, install, flags, environment, usable):
    install("dist-x", proposers=["echo = x_mod:Echo", "other = x_mod:Other"])
    found = rows(specdec(*flags, "list", "--all", "--json", **environment))
    assert {row["name"] for row in found if row["distribution"] == "dist-x" and row["status"] == "ok"} == usable


def test_list_formats(specdec, install):
    install("dist-x", "1.2", ["echo = x_mod:Echo"])
    fields = ("list", "--kind", "proposers", "--fields", "name,distribution", "--plugins", "x")[:-2]
    assert "echo\tdist-x" in specdec(*fields).stdout.splitlines()
    assert "echo" in specdec(*fields, "--format", "quiet").stdout.splitlines()
    assert {"name": "echo", "distribution": "dist-x"} in rows(specdec(*fields, "--format", "json"))
    human = specdec(*fields, "--format", "human").stdout.splitlines()
    assert human[0].split() == ["name", "distribution"]
    assert ["echo", "dist-x"] in [line.split() for line in human]


def test_list_of_one_kind(specdec, install):
    install("dist-x", "1.2", ["echo = x_mod:Echo"], ["hooks = x_mod"])
    assert {row["kind"] for row in rows(specdec("list", "--kind", "plugins", "--json"))} == {"plugins"}
    assert {row["kind"] for row in rows(specdec("list", "--kind", "proposers", "--json"))} == {"proposers"}


def test_functions_by_name_are_listed_and_probed_as_what_they_are(specdec, install):
    groups = {
        "specdec.datasets": ["mine = x_mod:rows", "number = x_mod:NUMBER"],
        "specdec.metrics_exporters": ["there = x_mod:export", "gone = x_mod:exprot"],
    }
    install(
        "dist-x",
        "1.2",
        others=groups,
        module="x_mod",
        source="NUMBER = 7\ndef rows(path): ...\ndef export(engine): ...",
    )
    listed = rows(specdec("list", "--kind", "datasets", "--json"))
    assert {row["kind"] for row in listed} == {"datasets"}
    assert {row["name"] for row in listed if row["distribution"] == "dist-x"} == {"mine", "number"}
    finished = specdec("--plugins", "dist-x", "list", "--probe", "--fields", "name,status,code,reason", "--json")
    probed = {row["name"]: row for row in rows(finished)}
    assert {name: (row["status"], row["code"]) for name, row in probed.items()} == {
        "mine": ("ok", None),
        "number": ("broken", "SD-E118"),
        "there": ("ok", None),
        "gone": ("broken", "SD-E102"),
    }
    assert 'the dataset "number" cannot be called' in probed["number"]["reason"]
    assert 'metrics exporter "gone"' in probed["gone"]["reason"]
    assert "export" in probed["gone"]["reason"].split("exprot", 1)[1], "what was meant"


def test_unknown_field_is_a_usage_error_with_a_suggestion(specdec):
    finished = specdec("list", "--fields", "nmae")
    assert finished.returncode == 2
    assert "Did you mean 'name'?" in finished.stderr


def entry(target, kind="proposers"):
    return PluginEntry(kind=kind, name="echo", target=target, distribution="dist-x", version="1.0")


@pytest.mark.parametrize(
    ("source", "code", "told"),
    [
        (ECHO, None, None),
        ("import absent_dependency", "SD-E102", 'its import of "absent_dependency" failed'),
        ("class Other: ...", "SD-E102", 'attribute "Echo"'),
        ("class Echo:\n    def __init__(self, config): ...", "SD-E110", 'no method "propose"'),
        ("raise RuntimeError('no licence')", "SD-E103", "RuntimeError: no licence"),
        ("raise SystemExit(0)", "SD-E103", "SystemExit"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "SD-E103", "killed the process with SIGSEGV"),
        ("import os\nos._exit(0)", "SD-E103", "ended the process with exit code 0"),
        ("import os\nprint('no device', flush=True)\nos._exit(7)", "SD-E103", "with exit code 7: no device"),
        pytest.param("import time\ntime.sleep(60)", "SD-E103", "did not end within 5 s", marks=pytest.mark.full),
    ],
    ids=["fine", "import fails", "attribute", "no proposer", "raises", "exits", "segfault", "ends", "says why", "hang"],
)
def test_probe_makes_every_failure_a_row(site, monkeypatch, source, code, told):
    (site / "x_mod.py").write_text(source)
    monkeypatch.syspath_prepend(site)
    probed = probe(entry("x_mod:Echo"), timeout_s=5 if "sleep" in source else 600)
    assert (probed.status, probed.code) == ("broken" if told else "ok", code)
    assert told is None or told in probed.reason
    assert "x_mod" not in sys.modules


def test_probe_of_a_hook_plugin_registers_it(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    for name, hook in (("good", "on_step"), ("wrong", "on_stepp")):
        (site / f"{name}.py").write_text(f"from specdec.sdk import hookimpl\n@hookimpl\ndef {hook}(stats): ...\n")
    assert probe(entry("good", "plugins")).status == "ok"
    wrong = probe(entry("wrong", "plugins"))
    assert (wrong.status, wrong.code) == ("broken", "SD-E117")
    assert "did you mean on_step?" in wrong.reason


def test_probe_ends_what_a_plugin_started(site, tmp_path, monkeypatch):
    beat = tmp_path / "beat"
    lives_on = f"    while True:\n        open({str(beat)!r}, 'a').write('.')\n        time.sleep(0.02)\n"
    waits = f"while not os.path.exists({str(beat)!r}):\n    time.sleep(0.02)\n"
    (site / "x_mod.py").write_text(f"import os, time\nif not os.fork():\n{lives_on}{waits}{ECHO}")
    monkeypatch.syspath_prepend(site)
    assert probe(entry("x_mod:Echo"), timeout_s=600).status == "ok"
    size = beat.stat().st_size
    time.sleep(0.5)
    assert beat.stat().st_size == size


def test_list_probe_shows_every_plugin_whatever_their_imports_do(specdec, install):
    sources = {
        "fine": ECHO,
        "raising": "raise RuntimeError('no licence')",
        "crashing": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "ending": "import os\nos._exit(0)",
    }
    for name, source in sources.items():
        install(f"dist-{name}", proposers=[f"{name} = {name}_mod:Echo"], module=f"{name}_mod", source=source)
    finished = specdec("--plugins", ",".join(sources), "list", "--probe", "--fields", "name,status,reason", "--json")
    found = {row["name"]: row for row in rows(finished)}
    assert {name: row["status"] for name, row in found.items()} == {
        "fine": "ok",
        "raising": "broken",
        "crashing": "broken",
        "ending": "broken",
    }
    assert "no licence" in found["raising"]["reason"]
    assert "SIGSEGV" in found["crashing"]["reason"]


@pytest.mark.parametrize("target", ["echo", "dist-x:echo", "x_mod:Echo", "x_mod.Echo"])
def test_info_shows_what_a_proposer_says(specdec, install, target):
    install(
        "dist-x",
        "1.2",
        ["echo = x_mod:Echo"],
        module="x_mod",
        source=ECHO,
        metadata="Project-URL: Documentation, https://docs.example\n",
    )
    finished = specdec("info", target, "--json")
    assert finished.returncode == 0, finished.stderr
    facts = json.loads(finished.stdout)
    assert facts["class"] == "x_mod:Echo"
    assert (facts["name"], facts["distribution"], facts["version"]) == ("echo", "dist-x", "1.2")
    assert (facts["api"], facts["summary"]) == ("1.0", "Drafts the newest token again.")
    assert facts["needs"] == {"history": True}
    assert facts["methods"] == ["on_finish", "propose"]
    assert facts["options"] == [
        {"name": "window", "type": "int", "default": 4, "description": "tokens looked at"},
        {"name": "corpus", "type": "str", "default": "required", "description": None},
    ]
    assert facts["file"].endswith("x_mod.py:5")
    assert facts["documentation"] == "https://docs.example"


def test_info_for_people_has_one_line_per_fact(specdec, install):
    install("dist-x", "1.2", ["echo = x_mod:Echo"], module="x_mod", source=ECHO)
    lines = specdec("info", "echo").stdout.splitlines()
    assert any(line.split() == ["version", "1.2"] for line in lines)
    assert any("window: int = 4   tokens looked at" in line for line in lines)


def test_info_schema_is_the_json_schema_of_the_options(specdec, install):
    install("dist-x", "1.2", ["echo = x_mod:Echo"], module="x_mod", source=ECHO)
    schema = json.loads(specdec("info", "echo", "--schema").stdout)
    assert schema["properties"]["window"]["default"] == 4
    assert schema["required"] == ["corpus"]


def test_info_shows_options_that_json_has_no_form_for(tmp_path, monkeypatch):
    own = (
        '        score: Callable[[int], float] = Field(abs, description="of a token")\n'
        '        width: int = Field(default_factory=lambda others: others["window"] + 1)\n'
        '        most: float = float("inf")\n'
        "        corpus: str\n"
    )
    source = "from collections.abc import Callable\n" + ECHO.replace("        corpus: str\n", own)
    (tmp_path / "odd_options.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = CliRunner().invoke(build_app(), ["info", "odd_options:Echo", "--json"])
    facts = json.loads(shown.stdout, parse_constant=pytest.fail)
    options = {each["name"]: each["default"] for each in facts["options"]}
    assert options["width"] == "computed from other options"
    assert options["corpus"] == "required"
    assert options["most"] == "Infinity"
    printed = CliRunner().invoke(build_app(), ["info", "odd_options:Echo", "--schema"]).stdout
    schema = json.loads(printed, parse_constant=pytest.fail)
    assert schema["properties"]["most"]["default"] == "Infinity"
    assert schema["properties"]["score"]["description"] == "of a token"
    assert schema["properties"]["window"]["type"] == "integer"


@pytest.mark.slow
def test_info_finds_a_proposer_that_a_hook_plugin_registers(specdec, install):
    install("dist-x", plugins=["hooks = h_mod"], module="x_mod", source=ECHO)
    source = "from specdec.sdk import hookimpl\n@hookimpl\ndef register_proposers(registry):\n"
    install(
        "dist-h", plugins=["more = h_mod2"], module="h_mod", source=source + "    registry.add('late', 'x_mod:Echo')\n"
    )
    finished = specdec("-p", "no:more", "info", "late", "--json")
    assert json.loads(finished.stdout)["distribution"] == "dist-x"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "code"), [("ecco", "SD-E101"), ("absent_pkg:Echo", "SD-E102"), ("x_mod.Ecco", "SD-E102")]
)
def test_errors_are_their_text_and_exit_code_three(specdec, install, target, code):
    install("dist-x", "1.2", ["echo = x_mod:Echo"], module="x_mod", source=ECHO)
    finished = specdec("info", target)
    assert finished.returncode == 3
    assert finished.stderr.startswith(code)
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""


def test_debug_shows_the_whole_traceback(specdec, install):
    install("dist-x", "1.2", ["echo = x_mod:Echo"], module="x_mod", source="raise RuntimeError('no licence')")
    finished = specdec("info", "echo", SPECDEC_DEBUG="1")
    assert finished.returncode == 3
    assert "Traceback" in finished.stderr
    assert "RuntimeError: no licence" in finished.stderr


@pytest.mark.parametrize("arguments", [["list", "--no-such-flag"], ["no-such-verb"], ["-p", "echo", "list"]])
def test_usage_errors_end_with_exit_code_two(specdec, arguments):
    assert specdec(*arguments).returncode == 2


@pytest.mark.full
def test_interrupt_ends_with_exit_code_130(install, site, tmp_path):
    source = f"open({str(tmp_path / 'started')!r}, 'w').close()\nimport time\ntime.sleep(60)"
    install("dist-x", proposers=["echo = x_mod:Echo"], module="x_mod", source=source)
    environment = os.environ | {"PYTHONPATH": str(site), "SPECDEC_PLUGINS": "echo"}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background of a shell ignores it
    running = subprocess.Popen([sys.executable, "-m", "specdec", "info", "echo"], env=environment, preexec_fn=heard)
    while not (tmp_path / "started").exists() and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=600) == 130


def test_version_is_the_distributions(specdec):
    finished = specdec("--version")
    assert finished.returncode == 0
    assert finished.stdout.startswith("specdec-sdk ")


def test_no_color_prints_no_escape_codes(specdec, install):
    install("dist-x", proposers=["odd = not a path"])
    finished = specdec("--no-color", "list", "--format", "human", NO_COLOR="", FORCE_COLOR="1")
    assert "odd" in finished.stdout
    assert "\x1b[31m" not in finished.stdout


def test_every_option_of_every_verb_has_a_sentence_of_help():
    group = typer.main.get_command(build_app())
    commands = [group, *group.commands.values()]
    options = [option for command in commands for option in command.params]
    assert len(options) > 15
    silent = [option.name for option in options if not (option.help or "").endswith(".")]
    assert not silent


def test_every_public_module_is_a_verb():
    folder = Path(_checks.__file__).parent
    names = {path.stem.replace("_", "-") for path in folder.glob("[a-z]*.py")}
    assert {"list", "info", "doctor"} <= names == set(typer.main.get_command(build_app()).commands)
    assert all(callable(import_module(f"specdec.cli.{name.replace('-', '_')}").command) for name in names)


def findings(settings=None):
    return {finding.subject: finding for finding in _checks.examine(settings or PluginSettings())}


def test_doctor_reports_supported_versions_from_our_own_metadata():
    found = findings()
    assert {"python", "torch", "transformers", "pluggy", "device", "C++ compiler"} <= found.keys()
    assert found["torch"].status == "ok"
    assert ">=2.11" in found["torch"].found


def test_doctor_calls_an_unsupported_or_absent_version_wrong():
    supported = _checks.SpecifierSet(">=2.11")
    old = _checks._version("torch", "2.9.1+cu128", supported)
    absent = _checks._version("torch", None, supported)
    assert (old.status, absent.status) == ("wrong", "wrong")
    assert "2.9.1+cu128 (supported: >=2.11)" in old.found
    assert _checks._version("torch", "2.12.0+cpu", supported).status == "ok"


@pytest.mark.parametrize(("cuda", "told"), [(None, "a build for CPUs"), ("13.0", "may be too old for CUDA 13.0")])
def test_a_gpu_that_torch_does_not_use_is_named(cuda, told, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(device, "DRIVERS", (str(tmp_path / "nvidia0"), str(tmp_path / "kfd")))
    assert _checks.check_device().status == "ok"
    assert device.device_of("auto").type == "cpu"
    assert not caplog.records
    (tmp_path / "nvidia0").touch()
    found = _checks.check_device()
    assert (found.status, told in found.found) == ("note", True)
    assert "pytorch.org" in found.fix
    assert device.device_of("auto").type == "cpu"
    assert told in caplog.text


def test_doctor_tells_how_to_repair_an_overwritten_import_package():
    assert _checks.check_owner(["specdec-sdk"]).status == "ok"
    assert _checks.check_owner([]).status == "ok"
    found = _checks.check_owner(["specdec", "specdec-sdk"])
    assert found.status == "wrong"
    assert "pip uninstall -y specdec &&" in found.fix
    assert "--force-reinstall" in found.fix


def test_doctor_finds_links_that_were_checked_out_as_text(tmp_path):
    for name in ("core", "sdk", "adapters", "testing", "lab", "cli", "assets"):
        (tmp_path / name).mkdir()
    (tmp_path / "plugins").write_text("../../plugins")
    found = _checks.check_parts(tmp_path)
    assert found.status == "wrong"
    assert "no folder plugins" in found.found
    assert "core.symlinks true" in found.fix


@pytest.mark.full
def test_doctor_reports_unusable_plugins_and_exits_with_four(specdec, install):
    others = {"specdec.datasets": ["rows = not a path"]}
    install("dist-x", proposers=["echo = x_mod:Echo", "odd = not a path"], others=others)
    install("dist-y", proposers=["echo = y_mod:Echo"])
    finished = specdec("doctor", "--json", SPECDEC_DISABLE_PLUGINS="nobody")
    assert finished.returncode == 4
    found = {row["subject"]: row for row in json.loads(finished.stdout)}
    assert found["plugin dist-x:odd"]["status"] == found["plugin dist-x:rows"]["status"] == "wrong"
    assert 'ask for "dist-x:echo"' in found["plugin dist-x:echo"]["fix"]
    assert found["plugin nobody"]["status"] == "note"


@pytest.mark.full
def test_doctor_is_content_with_blocked_plugins(specdec, install):
    install("dist-x", proposers=["echo = x_mod:Echo"])
    finished = specdec("-p", "no:echo", "doctor", "--json")
    found = {row["subject"]: row for row in json.loads(finished.stdout)}
    assert found["plugin dist-x:echo"]["status"] == "note"
    assert finished.returncode == 0, finished.stdout
