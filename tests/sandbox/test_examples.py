"""The examples of a fleet are commands that `temper` understands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.launch.cli import parse
from sandbox.e2b.templates import Template, read_templates
from sandbox.errors import PolicyError
from sandbox.tokens import read_access

EXAMPLES = Path(__file__).parents[2] / "examples/sandbox"


@pytest.mark.parametrize("kind", ["node", "front"])
def test_systemd_units(kind: str) -> None:
    text = (EXAMPLES / f"temper-sandbox-{kind}.service").read_text().replace("\\\n", " ")
    found = re.search(r"^ExecStart=\S*/temper (.*)$", text, re.MULTILINE)
    assert found
    parsed, _ = parse(found[1].split())
    assert (parsed.what, parsed.public) == ({"front": "serve"}.get(kind, kind), True)
    assert "TOKEN_FILE=" in text
    assert "_TOKEN=" not in text


def test_compose_file() -> None:
    data: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    nodes: list[str] = []
    for service in data["services"].values():
        parsed, _ = parse(["sandbox", *service["command"]])
        if parsed.what == "node":
            nodes.append(f"{parsed.name} http://{parsed.name}:{parsed.port}")
        assert set(service["secrets"]) <= set(data["secrets"])
        assert all(host.startswith("127.0.0.1:") for host in service.get("ports", ()))
    assert data["configs"]["nodes"]["content"].splitlines() == nodes


def test_the_access_file_wants_real_hashes(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    text = (EXAMPLES / "access.json").read_text()
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(PolicyError, match="sha256"):
        read_access(path, {})
    path.write_text(re.sub(r'"sha256": "[^"]*"', f'"sha256": "{"0" * 64}"', text))
    access = read_access(path, {})
    assert [who.project for _, who in access.principals] == ["lab/agents", "lab"]
    assert access.quotas["lab/judges"].cpus == 512


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "--nodes FILE"),
        (["--local", "--nodes", "x"], "--nodes FILE"),
        (["--local", "--e2b", "127.0.0.1"], "HOST:PORT"),
        (["--local", "--e2b", "127.0.0.1:99999"], "HOST:PORT"),
        (["--local", "--e2b", "0.0.0.0:7340"], "--public"),
        (["--local", "--host", "::"], "--public"),
        (["--local", "--e2b-templates", "x"], "--e2b HOST:PORT"),
        (["--local", "--e2b", "127.0.0.1:0", "--e2b-templates", "/nowhere"], "cannot be read"),
    ],
)
def test_a_front_that_is_told_nonsense_says_what_is_wrong(words: list[str], why: str) -> None:
    parsed, rest = parse(["sandbox", "serve", *words])
    with pytest.raises(PolicyError, match=re.escape(why)):
        parsed.action(parsed, rest)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"version": 2, "templates": {}}', '{"version": 1, "templates": {"a": {"image": "x"}}}',
        '{"version": 1, "templates": {"a": {"spec": {"labels": {}}}}}',
        '{"version": 1, "templates": {"a": {"spec": {"memory": 5}}}}',
        '{"version": 1, "templates": {"a": {"spec": {"limits": {"cpus": -1}}}}}',
        '{"version": 1, "templates": {"a": {"cwd": "work"}}}',
    ],
)  # fmt: skip
def test_templates_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "templates"
    path.write_text(text)
    with pytest.raises(PolicyError):
        read_templates(path)


def test_templates(tmp_path: Path) -> None:
    path = tmp_path / "templates"
    path.write_text(
        '{"version": 1, "templates": {"a": {"backend": "docker", "spec": {"limits": {"cpus": 2}}}}}'
    )
    read = read_templates(path)
    assert sorted(read) == ["a", "base"]
    assert (read["a"].backend, read["a"].spec.limits.cpus, read["a"].spec.limits.pids) == ("docker", 2, 64)
    assert read["base"] == Template()
