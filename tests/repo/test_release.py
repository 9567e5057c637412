"""The workflow that publishes uploads what our own scripts built and tried, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text()
WORKFLOW = yaml.safe_load(TEXT)
BUILD, PUBLISH = WORKFLOW["jobs"]["build"], WORKFLOW["jobs"]["publish"]


def using(job, action):
    """The arguments of a job's one step with this action."""
    (step,) = (each for each in job["steps"] if each.get("uses", "").startswith(f"{action}@"))
    return step["with"]


def test_what_is_published_is_what_was_tried():
    commands = [step["run"] for step in BUILD["steps"] if "run" in step]
    assert commands[-2:] == ['.ci/release dist "$GITHUB_REF_NAME"', ".ci/sdist dist"]
    assert using(BUILD, "actions/upload-artifact")["path"] == "dist/"
    assert using(PUBLISH, "actions/download-artifact") == {
        "name": using(BUILD, "actions/upload-artifact")["name"],
        "path": "dist/",
    }
    assert PUBLISH["needs"] == "build"
    assert not [step for step in PUBLISH["steps"] if "run" in step]


def test_only_the_job_that_publishes_may_sign_and_it_signs():
    assert (WORKFLOW["permissions"], BUILD["permissions"]) == ({}, {"contents": "read"})
    assert PUBLISH["permissions"] == {"id-token": "write"}
    assert using(PUBLISH, "pypa/gh-action-pypi-publish") == {"attestations": True}


def test_actions_are_pinned_to_commits():
    used = re.findall(r"uses: (.*)", TEXT)
    assert len(used) == 5
    assert [each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


def test_the_tools_that_build_are_pinned_and_all_there():
    (install,) = (step["run"] for step in BUILD["steps"] if "pip install" in step.get("run", ""))
    tools = install.partition("constraints.txt ")[2].split()
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"build", "twine", "hatchling"} <= set(tools) <= pinned


@pytest.mark.parametrize(("tag", "status"), [("v1.0.0rc1", 7), ("v1.0.0", 2)])
def test_a_tag_of_another_version_ends_before_anything_is_checked(tmp_path, tag, status):
    """`python` is a stub here: it "builds" empty files, and as twine it ends with 7."""
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(
        """#!/bin/sh
case $* in
    "-m build"*) touch "$5/specdec_sdk-1.0.0rc1.tar.gz" "$5/specdec_sdk-1.0.0rc1-py3-none-any.whl" ;;
    "-m twine check --strict"*) exit 7 ;;
esac
"""
    )
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "release", tmp_path / "dist", tag], env=environment, capture_output=True)
    assert done.returncode == status, done.stderr
