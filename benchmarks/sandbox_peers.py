"""What the fleet is compared with, on the same engine in the same run: plain Docker and SWE-ReX.

SWE-ReX runs a server in each container and talks to it over HTTP. Its image is our own with this machine's
`/usr` and this interpreter's packages mounted read-only, so that its start costs what its server costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import sysconfig
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import docker

from sandbox.images import ensure_image

_LAUNCHER = '#!/bin/sh\nexec /usr/bin/python3 -c "from swerex.server import main; main()" "$@"\n'


class PlainDocker:
    """Containers as anybody starts them: create, start, exec by way of the engine."""

    def __init__(self) -> None:
        self.client: Any = docker.from_env()
        self.image = ensure_image(self.client)

    def start(self, bare: bool = False) -> Any:
        """Creates and starts a container that waits; a bare one without the engine's part of its network."""
        return self.client.containers.run(
            self.image, ["/usr/bin/sleep", "3600"], detach=True, network_mode="none", init=True,
            network_disabled=bare,
        )  # fmt: skip

    def exec(self, container: Any) -> None:
        """Runs `true` by the engine's exec interface."""
        made = self.client.api.exec_create(container.id, ["/usr/bin/true"])
        self.client.api.exec_start(made["Id"])
        assert self.client.api.exec_inspect(made["Id"])["ExitCode"] == 0

    def ready(self) -> Any:
        """Starts a container and runs its first command."""
        container = self.start()
        self.exec(container)
        return container

    @contextlib.contextmanager
    def one(self) -> Generator[Any]:
        """A container that runs while the block does."""
        container = self.start()
        try:
            yield container
        finally:
            container.remove(force=True)


class SweRex:
    """SWE-ReX deployments; needs the extra `bench` and an interpreter as new as the system's."""

    def __init__(self) -> None:
        version = "{}.{}".format(*sys.version_info)
        if not (Path("/usr/bin") / f"python{version}").exists():
            raise SystemExit(
                f"SWE-ReX's server needs the packages of /usr/bin/python{version}, which is not there"
            )
        try:
            from swerex.deployment.docker import DockerDeployment
        except ImportError:
            raise SystemExit(
                "the peer is missing: pip install 'tempering[bench]', or leave it out: --no-peer"
            ) from None
        logging.getLogger("rex-deploy").disabled = True
        logging.getLogger("rex-runtime").disabled = True
        self._deployment: Any = DockerDeployment
        self._image = ensure_image(docker.from_env())

    @contextlib.asynccontextmanager
    async def box(self) -> AsyncGenerator[Any]:
        """A runtime that answers, for as long as the block runs."""
        with _launcher() as folder:
            packages = sysconfig.get_paths()["purelib"]
            mounts = ["/usr:/usr:ro", f"{packages}:/opt/packages:ro", f"{folder}:/opt/launcher:ro"]
            arguments = [part for mount in mounts for part in ("-v", mount)]
            arguments += ["-e", "PYTHONPATH=/opt/packages", "-e", "PATH=/opt/launcher:/usr/bin:/bin"]
            deployment = self._deployment(
                image=self._image, pull="never", docker_args=arguments, startup_timeout=60
            )
            await deployment.start()
            try:
                yield deployment.runtime
            finally:
                await deployment.stop()

    @staticmethod
    async def exec(runtime: Any) -> None:
        """Runs `true`."""
        from swerex.runtime.abstract import Command

        assert (await runtime.execute(Command(command=["/usr/bin/true"]))).exit_code == 0


@contextlib.contextmanager
def _launcher() -> Generator[str]:
    with tempfile.TemporaryDirectory() as folder:
        launcher = Path(folder, "swerex-remote")
        launcher.write_text(_LAUNCHER)
        launcher.chmod(0o755)
        Path(folder).chmod(0o755)
        yield folder


async def main() -> None:
    """Starts each once, to see that the peers run here."""
    with PlainDocker().one() as container:
        print("plain Docker:", container.short_id)
    peer = SweRex()
    async with peer.box() as runtime:
        await peer.exec(runtime)
        print("SWE-ReX answers")


if __name__ == "__main__":
    asyncio.run(main())
