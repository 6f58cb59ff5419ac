"""The probe that says which path every operation takes."""

import pytest

from model.diagnostics.paths import probe
from model.ops import dispatch


def test_a_cpu_runs_the_definitions():
    taken = probe("cpu")
    assert taken["policy"] == "reference (float32 on cpu)"
    assert set(taken.values()) <= {"reference", "reference (float32 on cpu)"}
    assert taken.items() <= dispatch.paths().items()


@pytest.mark.gpu
def test_a_card_runs_kernels_alone():
    taken = probe("cuda")
    assert taken.pop("policy") == "kernels"
    assert {name for name, path in taken.items() if path != "triton"} == set()
    assert len(taken) > 20
