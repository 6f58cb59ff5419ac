from __future__ import annotations

import importlib.util

import pytest

LEFT_OUT = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where vLLM is not installed, its tests are deselected, and counted in a line of their own."""
    if importlib.util.find_spec("vllm") is not None:
        return
    theirs = [item for item in items if item.get_closest_marker("vllm")]
    items[:] = [item for item in items if item not in theirs]
    config.hook.pytest_deselected(items=theirs)
    config.stash[LEFT_OUT] = len(theirs)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    count = config.stash.get(LEFT_OUT, 0)
    return [f"{count} tests need vLLM, which is not installed here: make test-vllm"] if count else []
