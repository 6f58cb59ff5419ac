import pytest

from benchmarks.kernel_bytes import parsed
from benchmarks.kernel_timing import BYTES, Peer, Row, measured, table

PRINTED = """==PROF== Connected to process 71
==PROF== Profiling "_update": 0%....100% - 1 pass
==PROF== Disconnected from process 71
"ID","Process ID","Process Name","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","71","python3","_update","Command line profiler metrics","dram__bytes_read.sum","byte","1,677,721,600"
"0","71","python3","_update","Command line profiler metrics","dram__bytes_write.sum","byte","1,600,000,000"
"1","71","python3","_coefficients","Command line profiler metrics","dram__bytes_read.sum","byte","1342177280"
"1","71","python3","_coefficients","Command line profiler metrics","sm__cycles.sum","cycle","9"
"2","71","python3","_update","Command line profiler metrics","dram__bytes_read.sum","byte","2,400"
"""


def test_bytes_are_read_by_kernel_from_what_the_profiler_prints() -> None:
    assert parsed(PRINTED) == {"_update": 3277724000.0, "_coefficients": 1342177280.0}
    assert parsed("==ERROR== no counters\n") == {}


def test_fewer_bytes_reach_more() -> None:
    levels = [
        Row("boundary", value, BYTES, 1.0, 0.0, (1.25, 1.1, 1.05)).level for value in (1.4, 1.2, 1.08, 1.0)
    ]
    assert levels == ["MISSED", "must", "good", "stretch"]


def test_a_peer_that_cannot_run_is_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> float:
        import a_library_that_nobody_has  # noqa: F401 # pyright: ignore[reportMissingImports]

        return 1.0

    def wrong() -> float:
        raise ValueError("its result differs by 1.0e-01")

    others = [measured("there", lambda: 30.0), measured("absent", missing), measured("broken", wrong)]
    row = Row("kernel", 10.0, "us", 10.0, 0.0, None, "first", 20.0, others=[*others, Peer("last", 5.0)])
    assert row.cells()[1] == (
        "2.00x first; 3.00x there; absent: a_library_that_nobody_has is not installed; "
        "broken: ValueError: its result differs by 1.0e-01; 0.50x last"
    )
    assert "2.00x first" in table([row])
    assert "differs" in capsys.readouterr().out
