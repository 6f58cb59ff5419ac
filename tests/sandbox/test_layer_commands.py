"""`temper sandbox layer`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.launch.cli import parse
from sandbox.errors import LayerError, PlantedAnswerError
from sandbox.layers.store import LayerStore


def temper(*words: object) -> int:
    parsed, rest = parse(["sandbox", "layer", *map(str, words)])
    return parsed.action(parsed, rest)


def test_a_layer_from_build_to_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, source = tmp_path / "state", tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("a")
    temper("build", source, "--kind", "workspace", "--name", "task:1", "--state", state)
    digest = capsys.readouterr().out.splitlines()[-1]
    assert LayerStore(state / "layers").get("task:1").digest == digest
    temper("ls", "--state", state)
    assert digest[7:19] in (listed := capsys.readouterr().out) and "workspace task:1" in listed
    temper("rm", "task:1", "--state", state)
    temper("gc", "--state", state)
    assert "1 layers deleted" in capsys.readouterr().out
    temper("ls", "--state", state)
    assert capsys.readouterr().out == ""


def test_a_dockerfile_with_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nARG TO\nCOPY Dockerfile $TO\n")
    words = ("--kind", "toolkit", "--name", "t:1", "--state", tmp_path / "state", "--build-arg", "TO=/x/y")
    temper("build", tmp_path / "Dockerfile", *words)
    assert "line 3: COPY Dockerfile $TO" in capsys.readouterr().out
    store = LayerStore(tmp_path / "state/layers")
    with store.opened(store.get("t:1")) as tree:
        assert (tree / "x/y").is_file()


def test_a_scan_refuses_and_is_waived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, answers = tmp_path / "source", tmp_path / "answers.json"
    source.mkdir()
    (source / "a.txt").write_text("the canary")
    answers.write_text(json.dumps({"strings": ["canary"]}))
    words = ("build", source, "--kind", "base", "--name", "b:1", "--state", tmp_path / "s", "--scan", answers)
    with pytest.raises(PlantedAnswerError, match=r"text:a\.txt"):
        temper(*words)
    assert LayerStore(tmp_path / "s/layers").digests() == []
    assert temper("scan", source, "--scan", answers, "--state", tmp_path / "s") == 1
    temper(*words, "--waive", "text:a.txt")
    assert temper("scan", "b:1", "--answers", answers, "--state", tmp_path / "s", "--waive", "text:*") == 0
    assert capsys.readouterr().out.endswith("0 findings\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("build", "nowhere", "--kind", "base", "--name", "x:1"), "there is no nowhere"),
        (("build", ".", "--kind", "base", "--name", "x"), "is no name of a layer"),
        (("build", ".", "--kind", "base", "--name", "x:1", "--waive", "text:a"), "--scan"),
        (("rm", "no:1"), "there is no layer 'no:1'"),
        (("scan", "no:1", "--scan", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_is_typed_wrong(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(LayerError, match=said):
        temper(*words, "--state", tmp_path)
