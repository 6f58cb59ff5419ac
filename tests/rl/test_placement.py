"""Bundles on paper: what fits, and the words for what does not."""

import pytest

from rl.placement import Bundle, Node, PlacementError, preflight

LEARNER = Bundle("learner", {"CPU": 2, "GPU": 1})
GENERATORS = [Bundle(f"generator-{i}", {"CPU": 1}) for i in range(2)]
NODES = [Node("a", {"CPU": 3, "memory": 1e9}), Node("b", {"CPU": 2, "GPU": 1})]


@pytest.mark.parametrize(("strategy", "places"), [("pack", ["b", "a", "a"]), ("spread", ["b", "a", "a"])])
def test_bundles_find_their_nodes(strategy, places) -> None:
    assert preflight([LEARNER, *GENERATORS], NODES, strategy) == places


def test_the_bundle_that_cannot_be_placed_is_named_with_what_is_left() -> None:
    with pytest.raises(PlacementError) as caught:
        preflight([LEARNER, *GENERATORS, Bundle("generator-2", {"GPU": 1, "CPU": 1})], NODES, "pack")
    text = str(caught.value)
    assert "no room for bundle 3: generator-2 (1 CPU, 1 GPU)" in text
    assert "learner (2 CPU, 1 GPU) on b" in text
    assert "a: 3 CPU; b: 0 CPU, 0 GPU" in text and "launcher.replica_gpus" in text


def test_strict_strategies_say_why() -> None:
    with pytest.raises(PlacementError, match=r"bundle \d: generator-\d .*on a node of its own"):
        preflight([LEARNER, *GENERATORS], NODES, "strict_spread")
    with pytest.raises(
        PlacementError, match=r"together: learner \+ generator-0 \+ generator-1 \(4 CPU, 1 GPU\)"
    ):
        preflight([LEARNER, *GENERATORS], NODES, "strict_pack")
    with pytest.raises(PlacementError, match=r"Nodes: \."):
        preflight([LEARNER], [], "strict_pack")
    whole = Node("c", {"CPU": 4, "GPU": 1})
    assert preflight([LEARNER, *GENERATORS], [*NODES, whole], "strict_pack") == ["c"] * 3
