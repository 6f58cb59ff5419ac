"""Planted answers are found wherever they lie, and a repository can be left without a past."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import py_compile
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.errors import LayerError, PlantedAnswerError
from sandbox.layers.answers import Answers, FindingKind
from sandbox.layers.clean_git import clean
from sandbox.layers.scan import refuse, scan
from sandbox.layers.scan_git import environment

SECRET = "canary-7f3a91"
LOOK = Answers(
    strings=[SECRET], regexes=[r"gold_[0-9]+"], names=["test_hidden*.py"], package="flask", version="2.9.1"
)


def found(root: Path, answers: Answers = LOOK) -> set[tuple[str, str]]:
    return {(str(finding.kind), finding.path) for finding in scan(root, answers)}


def git(folder: Path, *words: str) -> str:
    who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *words], cwd=folder, env={**environment(), **who}, capture_output=True, check=True
    )
    return done.stdout.decode().strip()


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "code.py").write_text("print(1)\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def tarred(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def plant(name: str, data: bytes) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    return make


def pyc(root: Path) -> None:
    (root / "m.py").write_text(f"def f():\n    return '{SECRET}'\n")
    py_compile.compile(str(root / "m.py"), cfile=str(root / "lib.pyc"))
    (root / "m.py").unlink()


def stale(root: Path) -> None:
    (root / "m.py").write_text("x = 'the solution'\n")
    py_compile.compile(str(root / "m.py"))
    (root / "m.py").write_text("x = 1\n")


def bomb(root: Path) -> None:
    (root / "bomb.gz").write_bytes(gzip.compress(bytes(1 << 20)) * 520)


WHEEL = zipped(
    {"flask/__init__.py": b"x", "flask-2.10.0.dist-info/METADATA": b"Name: Flask\nVersion: 2.10.0\n"}
)
NPM = tarred({"package/package.json": json.dumps({"name": "flask", "version": "3.0.0"}).encode()})
DATA = SECRET.encode()


@pytest.mark.parametrize(
    ("make", "kind", "path"),
    [
        (plant("a/b.txt", b"x" * 10_000_000 + DATA + b"y"), "text", "a/b.txt"),
        (plant("a.bin", b"\0\xff gold_17 \0"), "text", "a.bin"),
        (plant("tests/test_hidden_3.py", b""), "name", "tests/test_hidden_3.py"),
        (pyc, "bytecode", "lib.pyc"),
        (stale, "stale_bytecode", "__pycache__/m.cpython-311.pyc"),
        (plant("x.zip", zipped({"in/a": DATA})), "archive", "x.zip!in/a"),
        (plant("x.whl", zipped({"test_hidden_1.py": b"1"})), "archive", "x.whl!test_hidden_1.py"),
        (plant("x.tgz", tarred({"a": b"1", "b": DATA})), "archive", "x.tgz!b"),
        (plant("x.tar", tarred({"b": DATA}, "w")), "text", "x.tar"),
        (plant("notes.gz", gzip.compress(DATA)), "archive", "notes.gz"),
        (plant("notes.bz2", bz2.compress(DATA)), "archive", "notes.bz2"),
        (plant("n.zip", zipped({"a.tgz": tarred({"b": DATA})})), "archive", "n.zip!a.tgz!b"),
        (bomb, "unreadable", "bomb.gz"),
        (plant("bad.zip", b"PK\x03\x04 not at all"), "unreadable", "bad.zip"),
        (plant("root/.bash_history", b"ls\n"), "shell_history", "root/.bash_history"),
        (plant("root/.python_history", b"ls\n"), "shell_history", "root/.python_history"),
        (plant("src/.code.py.swp", b"x"), "editor_leftover", "src/.code.py.swp"),
        (plant("src/code.py~", b"x"), "editor_leftover", "src/code.py~"),
        (plant("src/code.py.orig", b"x"), "editor_leftover", "src/code.py.orig"),
        (plant("src/.wh.old.py", b""), "whiteout", "src/.wh.old.py"),
        (plant("root/.cache/pip/http/aa", b"x"), "package_cache", "root/.cache/pip"),
        (plant("root/.cache/pip/http/aa.body", WHEEL), "newer_package",
         "root/.cache/pip/http/aa.body!flask-2.10.0.dist-info/METADATA"),
        (plant("root/.npm/_cacache/content/ab", NPM), "newer_package",
         "root/.npm/_cacache/content/ab!package/package.json"),
        (plant("lib/site-packages/Flask-3.0.dist-info/RECORD", b"x"), "newer_package",
         "lib/site-packages/Flask-3.0.dist-info"),
        (plant("node_modules/flask/package.json", b'{"name": "flask", "version": "2.9.2"}'), "newer_package",
         "node_modules/flask/package.json"),
        (plant("go/pkg/mod/github.com/x/flask@v2.9.10/a.go", b"x"), "newer_package",
         "go/pkg/mod/github.com/x/flask@v2.9.10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_kind_is_found(tmp_path: Path, make: Callable[[Path], None], kind: str, path: str) -> None:
    make(tmp_path)
    assert (kind, path) in found(tmp_path)


def test_whiteouts_and_links_with_the_name_of_an_answer(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(f"/nowhere/{SECRET}")
    wanted = {("name", "link")}
    if os.geteuid() == 0:
        os.mknod(tmp_path / "test_hidden_1.py", 0o020000, 0)
        wanted.add(("whiteout", "test_hidden_1.py"))
    assert found(tmp_path) == wanted


def test_a_name_that_is_no_text_can_be_said(tmp_path: Path) -> None:
    (Path(os.fsdecode(bytes(tmp_path) + b"/\xff.txt"))).write_text(SECRET)
    (finding,) = scan(tmp_path, LOOK)
    assert str(finding).encode().startswith(rb"text:\udcff.txt")


def test_a_clean_tree_has_no_findings(tmp_path: Path) -> None:
    plant("src/code.py", b"print('canary')")(tmp_path)
    plant("lib/site-packages/flask-2.9.1.dist-info/METADATA", b"Name: flask\nVersion: 2.9.1\n")(tmp_path)
    plant("lib/site-packages/flask_login-9.0.dist-info/METADATA", b"Name: flask-login\nVersion: 9\n")(
        tmp_path
    )
    plant("data.tgz", tarred({"a": b"nothing"}))(tmp_path)
    py_compile.compile(str(tmp_path / "src/code.py"))
    assert found(tmp_path) == set()
    refuse(scan(tmp_path, LOOK))


def loose(folder: Path) -> str:
    (folder / "answer").write_text(SECRET)
    return git(folder, "hash-object", "-w", "answer")


def packed(folder: Path) -> str:
    (folder / "answer").write_text(SECRET)
    git(folder, "add", "answer")
    git(folder, "commit", "-qm", "answer")
    name = git(folder, "rev-parse", "HEAD:answer")
    git(folder, "rm", "-q", "answer")
    git(folder, "commit", "-qm", "gone")
    git(folder, "gc", "-q")
    return name


def amended(folder: Path) -> str:
    (folder / "answer").write_text(SECRET)
    git(folder, "add", "answer")
    git(folder, "commit", "-qm", "answer")
    name = git(folder, "rev-parse", "HEAD:answer")
    git(folder, "reset", "-q", "--hard", "HEAD~1")
    return name


def stashed(folder: Path) -> str:
    (folder / "code.py").write_text(SECRET)
    git(folder, "stash")
    return git(folder, "rev-parse", "stash@{0}:code.py")


def tagged(folder: Path) -> str:
    git(folder, "tag", "-a", "v2", "-m", SECRET)
    return git(folder, "rev-parse", "v2")


def remote(folder: Path) -> str:
    name = amended(folder)
    git(folder, "update-ref", "refs/remotes/origin/main", "HEAD@{1}")
    git(folder, "remote", "add", "origin", "https://example.org/x")
    return name


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (loose, {"git_unreachable"}),
        (packed, {"git_history", "git_reflog"}),
        (amended, {"git_unreachable", "git_reflog"}),
        (stashed, {"git_stash", "git_unreachable"}),
        (tagged, {"git_tag", "git_unreachable"}),
        (remote, {"git_remote", "git_unreachable"}),
    ],
)
def test_answers_in_git_are_found_and_cleaned(
    tmp_path: Path, make: Callable[[Path], str], kinds: set[str]
) -> None:
    folder = repository(tmp_path / "project")
    name = make(folder)
    (folder / "answer").unlink(missing_ok=True)
    there = found(tmp_path)
    assert ("git_object", f"project/.git!{name}") in there
    assert kinds <= {kind for kind, _ in there}
    assert clean(tmp_path) == [folder]
    assert found(tmp_path) == set()
    assert git(folder, "log", "--format=%an %s") == "task Task"
    assert git(folder, "status", "--porcelain") == ""
    assert git(folder, "fsck", "--unreachable", "--no-reflogs") == ""


def test_the_hidden_test_of_a_later_commit_is_found_by_its_name(tmp_path: Path) -> None:
    folder = repository(tmp_path)
    (folder / "test_hidden_9.py").write_text("1")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "tests")
    git(folder, "reset", "-q", "--hard", "HEAD~1")
    assert "git_object" in {kind for kind, _ in found(tmp_path)}


def test_cleaning_keeps_files_and_gives_the_same_repository_each_time(tmp_path: Path) -> None:
    for place in ("one", "two"):
        folder = repository(tmp_path / place)
        (folder / ".gitignore").write_text("ignored\n")
        (folder / "ignored").write_text("kept")
        (folder / "code.py").write_text("changed\n")
        git(folder, "add", ".gitignore")
        clean(folder)
        assert (folder / "ignored").read_text() == "kept"
        assert git(folder, "ls-files").split() == [".gitignore", "code.py"]
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes(), path


def test_a_hostile_repository_runs_nothing(tmp_path: Path) -> None:
    folder = repository(tmp_path / "x")
    trap = tmp_path / "ran"
    with (folder / ".git/config").open("a") as file:
        file.write(
            f'[core]\nfsmonitor = "touch {trap}"\npager = "touch {trap}"\n[alias]\nfsck = "!touch {trap}"\n'
        )
    (folder / ".git/hooks").mkdir(exist_ok=True)
    for hook in ("pre-commit", "post-commit", "post-index-change"):
        (folder / ".git/hooks" / hook).write_text(f"#!/bin/sh\ntouch {trap}\n")
        (folder / ".git/hooks" / hook).chmod(0o755)
    scan(tmp_path, LOOK)
    clean(tmp_path)
    assert not trap.exists()


def test_findings_refuse_unless_waived_by_name(tmp_path: Path) -> None:
    plant("a.txt", DATA)(tmp_path)
    plant("b.py~", b"")(tmp_path)
    with pytest.raises(PlantedAnswerError, match=r"text:a\.txt(.|\n)*editor_leftover:b\.py~"):
        refuse(scan(tmp_path, LOOK))
    some = Answers(strings=[SECRET], waive=["text:a.txt"])
    assert [finding.kind for finding in scan(tmp_path, some)] == [FindingKind.EDITOR_LEFTOVER]
    refuse(scan(tmp_path, Answers(strings=[SECRET], waive=["text:a.txt", "editor_leftover:*"])))


def test_the_lines_of_a_gold_patch_are_answers(tmp_path: Path) -> None:
    line = "    return compute_exact(total, 'half-even')"
    gold = f"--- a/x.py\n+++ b/x.py\n@@ -1 +1,2 @@\n-old line here\n+{line}\n+x\n"
    (tmp_path / "gold.patch").write_text(gold)
    (tmp_path / "answers.json").write_text(json.dumps({"patches": ["gold.patch"]}))
    answers = Answers.read(tmp_path / "answers.json")
    assert list(answers.strings) == ["return compute_exact(total, 'half-even')"]
    tree = tmp_path / "tree"
    plant("x.py", b"def f(total):\n    return compute_exact(total, 'half-even')\n")(tree)
    py_compile.compile(str(tree / "x.py"))
    kinds = {kind for kind, _ in found(tree, answers)}
    assert kinds == {"text", "bytecode"}


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"string": ["x"]}', '{"regexes": ["("]}', '{"patches": ["no"]}']
)
def test_answers_that_say_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(LayerError, match=r"a\.json"):
        Answers.read(tmp_path / "a.json")
