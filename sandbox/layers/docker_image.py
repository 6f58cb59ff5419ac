"""Images of the local Docker engine as roots, and layers as images of it. Nothing is ever pulled."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import docker
import docker.errors
import requests.exceptions

from sandbox.errors import LayerError
from sandbox.layers.records import Config
from sandbox.layers.tars import config_of

_UNREACHABLE = (docker.errors.DockerException, requests.exceptions.RequestException)


def export_image(name: str, to: Path) -> Config:
    """Writes the root of a local image as an archive, and returns its configuration.

    Raises:
        LayerError: The engine does not answer, or does not have it.
    """
    try:
        client = cast("Any", docker.from_env(timeout=600))
    except _UNREACHABLE as error:
        raise LayerError(
            f"there is no base layer {name!r}, and no Docker engine answers that could have it as an image: "
            "build it first (`temper sandbox layer build --kind base`); nothing is fetched from registries"
        ) from error
    try:
        image = client.images.get(name)
        container = client.containers.create(image.id, ["/nothing"])
        try:
            with to.open("wb") as file:
                for piece in container.export():
                    file.write(piece)
        finally:
            container.remove(force=True)
        return config_of(image.attrs["Config"] or {})
    except docker.errors.ImageNotFound as error:
        raise LayerError(
            f"there is neither a base layer nor a local image {name!r}: build it first, or `docker load` it; "
            "nothing is fetched from registries"
        ) from error
    except _UNREACHABLE as error:
        raise LayerError(f"the image {name!r} could not be exported: {error}") from error
    finally:
        client.close()
