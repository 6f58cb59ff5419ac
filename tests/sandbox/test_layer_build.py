"""Layers out of Dockerfiles and archives: what instructions do, and what they say when they cannot."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from sandbox.errors import LayerError
from sandbox.layers import build
from sandbox.layers.dockerfile import expand, parse
from sandbox.layers.inside import inside
from sandbox.layers.mounts import mounts_below
from sandbox.layers.records import Kind, Layer
from sandbox.layers.store import LayerStore
from sandbox.layers.tree import walk

ROOM = 64 << 20
BASE = "tempering-python:built-in"


@pytest.fixture(scope="module")
def store(layered_state: Path) -> LayerStore:
    return LayerStore(layered_state / "layers")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "src/sub").mkdir(parents=True)
    (tmp_path / "src/a.py").write_text("a")
    (tmp_path / "src/sub/b.log").write_text("b")
    (tmp_path / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "link").symlink_to("src/a.py")
    with tarfile.open(tmp_path / "more.tgz", "w:gz") as tar:
        tar.add(tmp_path / "src/a.py", "packed/a.py")
    return tmp_path


def made(store: LayerStore, context: Path, text: str, kind: Kind = Kind.WORKSPACE, **options: Any) -> Layer:
    (context / "Dockerfile").write_text(text)
    with build.from_dockerfile(store, context / "Dockerfile", kind, room=ROOM, **options) as draft:
        layer = store.publish(draft.tree, kind, draft.config, draft.over)
    assert not mounts_below(store.folder) and not list((store.folder / "drafts").iterdir())
    return layer


def files(store: LayerStore, layer: Layer) -> dict[str, str]:
    with store.opened(layer) as tree:
        return {
            found.path: Path(found.full).read_text(errors="replace") if found.kind == "file" else found.kind
            for found in walk(tree)
            if found.kind != "dir"
        }


def test_from_scratch(store: LayerStore, context: Path) -> None:
    text = """
    # a comment
    ARG FIRST=1
    FROM scratch
    ARG WHERE=/workspace/app
    ENV NAME=value OTHER="two words" \\
        # a comment inside
        LAST=$WHERE
    WORKDIR $WHERE
    COPY src .
    COPY --chmod=750 tool.sh link ${WHERE}/bin/
    COPY ["tool.sh", "/opt/a b"]
    ADD more.tgz /opt/
    WORKDIR ../other
    """
    layer = made(store, context, text)
    assert files(store, layer) == {
        "workspace/app/a.py": "a",
        "workspace/app/sub/b.log": "b",
        "workspace/app/bin/tool.sh": "#!/bin/sh\necho tool\n",
        "workspace/app/bin/link": "a",
        "opt/a b": "#!/bin/sh\necho tool\n",
        "opt/packed/a.py": "a",
    }
    assert layer.config.env == {"NAME": "value", "OTHER": "two words", "LAST": "/workspace/app"}
    assert (layer.config.workdir, layer.over) == ("/workspace/other", "")


def test_arguments_given_and_ignored_files(store: LayerStore, context: Path) -> None:
    (context / ".dockerignore").write_text("# no logs\n**/*.log\nDockerfile\n*.tgz\ntool.*\n!tool.sh\n")
    layer = made(store, context, "FROM scratch\nARG TO=/x\nCOPY . $TO/\n", arguments={"TO": "/y"})
    assert set(files(store, layer)) == {"y/.dockerignore", "y/link", "y/src/a.py", "y/tool.sh"}


class TestCommands:
    def test_a_workspace_is_what_was_added(self, store: LayerStore, context: Path) -> None:
        text = f"""
        FROM {BASE}
        ENV TEXT=hello
        WORKDIR /workspace
        COPY src src
        RUN echo $TEXT > made && rm /usr/bin/seq && mkdir -p deep/er && chmod 6755 made
        USER 1234
        RUN ["sh", "-c", "id -u > /tmp/me; echo x > /usr/bin/mine || true"]
        """
        layer = made(store, context, text)
        assert files(store, layer) == {
            "workspace/src/a.py": "a",
            "workspace/src/sub/b.log": "b",
            "workspace/made": "hello\n",
            "usr/bin/seq": "whiteout",
            "tmp/me": "1234\n",
        }
        assert layer.over == store.get(BASE).digest
        with store.opened(layer) as tree:
            assert (tree / "workspace/made").stat().st_mode & 0o7777 == 0o755

    def test_a_base_is_the_whole_root(self, store: LayerStore, context: Path) -> None:
        layer = made(store, context, f"FROM {BASE}\nRUN rm /usr/bin/seq && echo 1 > /etc/new\n", Kind.BASE)
        there = files(store, layer)
        assert "usr/bin/seq" not in there and there["etc/new"] == "1\n" and "usr/bin/cat" in there
        assert layer.entries > store.get(BASE).entries - 5

    def test_commands_have_no_network_no_host_and_an_end(self, store: LayerStore, context: Path) -> None:
        text = f"""FROM {BASE}
        RUN test ! -e {context} && ! test -w /proc/sys/kernel/core_pattern
        RUN ! sh -c "echo x > /proc/sys/kernel/core_pattern" && ! sh -c "head -c 1 /dev/vda"
        RUN ! python3 -c "import socket; socket.create_connection(('127.0.0.1', 22), 1)"
        RUN ! mkfifo -m 600 /dev/null/x; ! dd if=/dev/vda of=/tmp/x count=1
        """
        there = files(store, made(store, context, text))
        assert [name for name in there if "__pycache__" not in name] == []

    def test_a_full_disk_fails_the_build_alone(self, store: LayerStore, context: Path) -> None:
        with pytest.raises(LayerError, match=r"line 2: RUN: .*No space left"):
            made(store, context, f"FROM {BASE}\nRUN dd if=/dev/zero of=/big bs=1M count=200\n")

    def test_a_copy_never_leaves_the_root_through_a_link(
        self, store: LayerStore, context: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        outside = tmp_path_factory.mktemp("outside")
        text = f"FROM {BASE}\nRUN ln -s {outside} /workspace/out && ln -s / /workspace/top\n"
        layer = made(store, context, text + "COPY tool.sh /workspace/out/\nCOPY tool.sh /workspace/top/t\n")
        assert list(outside.iterdir()) == []
        assert {f"{outside}/tool.sh".lstrip("/"), "t"} <= set(files(store, layer))
        (context / "d/sub").mkdir(parents=True)
        (context / "d/sub/f").touch()
        layer = made(store, context, f"FROM {BASE}\nRUN ln -s {outside} /sub\nCOPY d /\n")
        assert f"{outside}/f".lstrip("/") in files(store, layer)
        assert list(outside.iterdir()) == []

    def test_a_link_where_a_command_has_a_mount(self, store: LayerStore, context: Path) -> None:
        (context / "root").mkdir()
        (context / "root/run").symlink_to("/etc")
        with pytest.raises(LayerError, match="line 3: RUN: /run is a link"):
            made(store, context, "FROM scratch\nCOPY root /\nRUN true\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no FROM"),
        ("COPY a b\nFROM scratch", "line 1: COPY: only ARG"),
        ("FROM scratch\n\n# x\nEXPOSE 80", "line 4: EXPOSE: not supported"),
        ("FROM scratch\nHEALTHCHECK CMD x", "line 2: HEALTHCHECK"),
        ("FROM scratch\nCMD x", "line 2: CMD"),
        ("FROM scratch AS x\nFROM scratch", "line 2: FROM: a second stage"),
        ("FROM scratch AS x", "line 1: FROM: stages"),
        ("FROM --platform=x scratch", "line 1: FROM: the flag --platform"),
        ("FROM scratch\nCOPY --from=x a b", "line 2: COPY: the flag --from"),
        ("FROM scratch\nCOPY --chown=1:1 a b", "line 2: COPY: the flag --chown"),
        ("FROM scratch\nRUN <<EOF\nx\nEOF", "line 2: RUN: here-documents"),
        ("FROM scratch\nADD https://x/y /z", "line 2: ADD: https://x/y is not here"),
        ("FROM scratch\nCOPY ../x /", "line 2: COPY: '../x' leads out"),
        ("FROM scratch\nCOPY nothing /", "line 2: COPY: there is no 'nothing'"),
        ("FROM scratch\nCOPY tool.sh", "line 2: COPY: name a source"),
        ("FROM scratch\nCOPY out /", "line 2: COPY: 'out' leads out"),
        ("FROM scratch\nCOPY", "line 2: COPY: nothing follows"),
        ("FROM scratch\nENV 1x=2", "line 2: ENV: '1x' is no name"),
        ('FROM scratch\nENV A="', "line 2: ENV: "),
        ("FROM scratch\nRUNN x", "line 2: RUNN: not supported"),
        ("# escape=`\nFROM scratch", "line 1: another escape"),
        ("FROM no-such-image:1", "line 1: FROM: there is n"),
        (f"FROM {BASE}\nRUN echo out; echo err >&2; exit 3", "line 2: RUN: .* exited with 3: out.+err"),
        (f"FROM {BASE}\nUSER nobody-here\nRUN true", "line 3: RUN: the root has no user"),
        ("FROM scratch\nRUN true", "line 2: RUN: "),
    ],
)  # fmt: skip
def test_what_cannot_be_built_names_line_and_instruction(
    store: LayerStore, context: Path, text: str, said: str
) -> None:
    (context / "out").symlink_to("/etc/passwd")
    with pytest.raises(LayerError, match=said):
        made(store, context, text)
    assert not mounts_below(store.folder) and not list((store.folder / "drafts").iterdir())


def test_variables() -> None:
    values = {"A": "1", "EMPTY": ""}
    text = "$A ${A} ${B:-two} ${A:-x} ${A:+yes} ${B:+no} \\$A $B ${EMPTY:-$A}."
    assert expand(text, values) == "1 1 two 1 yes  $A  1."
    assert [(step.line, step.name) for step in parse("FROM a\nRUN x \\\n # c\n y\nRUN z")] == [
        (1, "FROM"), (2, "RUN"), (5, "RUN"),
    ]  # fmt: skip


def test_paths_inside_a_root(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    for name, target in {"lib": "usr/lib", "abs": "/usr", "up": "../../..", "loop": "loop"}.items():
        (tmp_path / name).symlink_to(target)
    assert inside(tmp_path, "/lib/x") == "usr/lib/x"
    assert inside(tmp_path, "abs/lib/../y") == "usr/y"
    assert inside(tmp_path, "up/etc/../../x") == "x"
    with pytest.raises(LayerError, match="too many links"):
        inside(tmp_path, "loop/x")


def tar_of(members: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, what in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
                continue
            info.type, info.linkname = what
            tar.addfile(info)
    return buffer.getvalue()


def unpacked(store: LayerStore, data: bytes, path: Path) -> Layer:
    path.write_bytes(data)
    with build.from_archive(store, path) as draft:
        return store.publish(draft.tree, Kind.BASE, draft.config)


def test_an_image_of_several_layers(store: LayerStore, tmp_path: Path) -> None:
    first = tar_of({"etc/a": b"1", "etc/b": b"2", "old/x": b"3", "bin/sh": (tarfile.SYMTYPE, "/bin/bash")})
    second = tar_of(
        {"etc/.wh.a": b"", "old/.wh..wh..opq": b"", "old/y": b"4", "etc/hard": (tarfile.LNKTYPE, "old/y")}
    )
    config = {"config": {"Env": ["A=1=2"], "WorkingDir": "/w", "User": "me"}}
    image = {
        "manifest.json": json.dumps([{"Config": "c.json", "Layers": ["1.tar", "2.tar"]}]).encode(),
        "c.json": json.dumps(config).encode(), "1.tar": first, "2.tar": second,
    }  # fmt: skip
    layer = unpacked(store, tar_of(image), tmp_path / "image.tar")
    assert files(store, layer) == {"etc/b": "2", "bin/sh": "link", "old/y": "4", "etc/hard": "4"}
    assert (layer.config.env, layer.config.workdir, layer.config.user) == ({"A": "1=2"}, "/w", "me")


def test_a_whiteout_behind_a_link_removes_nothing(store: LayerStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").touch()
    first, second = tar_of({"a": (tarfile.SYMTYPE, str(outside))}), tar_of({"a/.wh.x": b""})
    manifest = json.dumps([{"Config": "c", "Layers": ["1", "2"]}]).encode()
    image = tar_of({"manifest.json": manifest, "c": b'{"config": {}}', "1": first, "2": second})
    with pytest.raises(LayerError, match="behind a link"):
        unpacked(store, image, tmp_path / "image.tar")
    assert (outside / "x").exists()


@pytest.mark.parametrize(
    "members",
    [
        {"../x": b"1"},
        {"/etc/x": b"1"},
        {"a": (tarfile.SYMTYPE, "/etc"), "a/x": b"1"},
        {"a": (tarfile.LNKTYPE, "/etc/passwd")},
        {"a": (tarfile.LNKTYPE, "../../etc/passwd")},
        {"l": (tarfile.SYMTYPE, "/etc/passwd"), "a": (tarfile.LNKTYPE, "l")},
        {"pipe": (tarfile.FIFOTYPE, "")},
        {"x": b"1", "./x": b"2"},
    ],
)
def test_archives_that_lead_out_are_refused(
    store: LayerStore, tmp_path: Path, members: dict[str, Any]
) -> None:
    with pytest.raises(LayerError):
        unpacked(store, tar_of(members), tmp_path / "bad.tar")
    assert Path("/etc/passwd").exists()


@pytest.fixture
def image(store: LayerStore, tmp_path: Path) -> Iterator[str]:
    client = docker.from_env()
    name = f"tempering-test-{os.getpid()}:1"
    data = tar_of({"bin/tool": b"x", "etc/y": b"y"})
    client.api.import_image_from_data(data, *name.split(":"), changes=["ENV HAS=it"])
    yield name
    client.images.remove(name, force=True)
    client.close()


@pytest.mark.docker
def test_from_a_local_image(store: LayerStore, context: Path, image: str) -> None:
    layer = made(store, context, f"FROM {image}\nCOPY tool.sh /\n", Kind.BASE)
    assert {"bin/tool", "etc/y", "tool.sh"} <= set(files(store, layer))
    assert layer.config.env["HAS"] == "it"
