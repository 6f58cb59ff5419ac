"""What the run under NVIDIA's checkers makes of their output; the run itself needs a card."""

import pytest

pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")

from benchmarks import sanitize
from benchmarks.sanitize_cases import CASES

LAUNCHED = "launched memory model.ops.row_sums.triton._sum 1\n"
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _sum+0x120 in triton.py:30
=========     by thread (96,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACE = """========= Error: Race reported between Write access at _forward+0x810 in gluon.py:120
=========     and Read access at _forward+0x9a0 in gluon.py:131 [128 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def report(tool, case, text):
    return sanitize.report(tool, (case,), sanitize.read(text), 1.0)


def test_a_report_fails_and_names_its_kernel(capsys):
    assert report("memcheck", "memory", LAUNCHED + CLEAN)
    assert not report("memcheck", "memory", LAUNCHED + INVALID)
    assert "memcheck memory model.ops.row_sums.triton._sum launched 1: 1 reports" in capsys.readouterr().out
    assert not report("racecheck", "memory", LAUNCHED + RACE.replace("_forward", "_sum"))


def test_a_process_that_ended_early_fails():
    assert not report("memcheck", "memory", LAUNCHED)
    assert not report("memcheck", "memory", CLEAN)


def test_known_and_foreign_races_pass_and_the_write_on_purpose_must_be_seen():
    assert report("racecheck", "attention", "launched attention gluon._forward 1\n" + RACE)
    invalid = INVALID.replace("_sum", "_forward")
    assert not report("memcheck", "attention", "launched attention gluon._forward 1\n" + invalid)
    other = "launched attention backward._query_gradient 1\n" + RACE.replace("_forward", "_query_gradient")
    assert not report("racecheck", "attention", other)
    foreign = RACE.replace("_forward", "nvjet_tst")
    assert report("racecheck", "memory", LAUNCHED + foreign)
    launched = "launched beyond sanitize_cases._beyond 1\n"
    assert report("memcheck", "beyond", launched + INVALID)
    assert not report("memcheck", "beyond", launched + CLEAN)


def test_every_case_has_a_group_and_kernels_are_found_where_they_are_launched():
    assert sorted(CASES) == sorted(case for group in sanitize.GROUPS for case in group)
    kernels = sanitize.kernels_of("model.ops")
    assert "model.ops.row_sums.triton._sum" in kernels
    assert "model.ops.sparse_attention.backward.gather_rows" in kernels
