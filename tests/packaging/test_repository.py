from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from rl.launch.roots import PACKAGES, ForeignPackageError, check_roots

ROOT = Path(__file__).parents[2]


def test_all_our_packages_come_from_one_root():
    assert check_roots() == ROOT
    with pytest.raises(ForeignPackageError, match="package 'no_such_package' is not there"):
        check_roots(["no_such_package"])
    with pytest.raises(ForeignPackageError, match="`import json` finds"):
        check_roots(["json"])


def test_the_scripts_are_well_formed():
    for script in (".ci/run", "scripts/need_sandbox.sh", "scripts/docker_marker.sh"):
        assert subprocess.run(["bash", "-n", script], cwd=ROOT, check=False).returncode == 0
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_target_of_the_makefile_can_be_planned(tmp_path: Path):
    names = "demo test test-slow test-all check bench coverage docs vllm test-vllm test-vllm-nodes"
    for target in names.split():
        command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}", f"VLLM={tmp_path / 'vllm'}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_an_old_python_is_refused_with_the_versions_that_do(tmp_path: Path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    command = ["make", "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Tempering needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert "Python 3.9.2" in done.stderr


def test_heavy_libraries_stay_out_of_the_plain_installation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]}
    assert not names & {"triton", "vllm"}
    assert {"gpu", "vllm", "dev"} <= project["optional-dependencies"].keys()


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_its_command_works(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    source = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    assert source - names == set()
    (points,) = (tmp_path / "site").glob("*.dist-info/entry_points.txt")
    assert "temper = rl.launch.cli:main" in points.read_text()
    command = [sys.executable, "-c", "import sys; from rl.launch.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "train", "experiment=calc", "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "first task of calc, train" in done.stdout
