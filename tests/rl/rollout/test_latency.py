import pytest

from rl.rollout.latency import Delays, Latency, LatencyError


def test_waits_have_the_stated_distribution() -> None:
    delays = Delays(Latency(mean_s=0.2, slow_share=0.02, slow_s=5.0), 0)
    waits = [delays.seconds(f"task/{i % 100}", i % 3) for i in range(20_000)]
    ordinary = [wait for wait in waits if wait != 5.0]
    assert 1 - len(ordinary) / len(waits) == pytest.approx(0.02, abs=0.004)
    assert sum(ordinary) / len(ordinary) == pytest.approx(0.2, rel=0.04)
    assert sum(wait > 0.2 for wait in ordinary) / len(ordinary) == pytest.approx(0.368, abs=0.02)


def test_the_kth_call_of_a_task_waits_the_same_whatever_runs_beside_it() -> None:
    one, two = (Delays(Latency(), 7) for _ in range(2))
    first = [one.seconds("a", 0), one.seconds("a", 0), one.seconds("b", 1)]
    second = [two.seconds("b", 1), two.seconds("a", 0), two.seconds("a", 0)]
    assert first == [*second[1:], second[0]]
    assert first[0] != first[1]


@pytest.mark.parametrize("wrong", [{"mean_s": -1}, {"slow_share": 1.5}, {"slow_s": float("inf")}])
def test_impossible_latencies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(LatencyError, match=r"env\.latency\."):
        Latency(**wrong)
