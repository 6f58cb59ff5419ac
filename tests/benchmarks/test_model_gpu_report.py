"""The loop over sections and the table that the model-level benchmarks on a GPU share."""

import argparse

import pytest
import torch

from benchmarks import model_gpu, model_gpu_slice
from benchmarks import model_gpu_report as report
from benchmarks.model_gpu_report import Figure
from benchmarks.model_gpu_setup import official_widths
from model.config import PolicyConfig
from model.policy import Policy

TARGETS = (3.0, 2.0, 1.0)


@pytest.fixture(scope="module")
def policy():
    return Policy(PolicyConfig.preset("pico"))


@pytest.mark.parametrize(
    ("value", "least", "reached"),
    [(4, False, "MISSED"), (3, False, "must"), (1, False, "stretch"), (3, True, "stretch")],
)
def test_a_figure_says_its_best_target(value, least, reached):
    assert Figure("steps", value, "ms", TARGETS, least).reached == reached
    assert Figure("steps", value, "ms").reached == "-"


def test_a_nan_misses_its_target():
    assert Figure("steps", float("nan"), "ms", TARGETS).reached == "MISSED"


def test_figures_are_printed_before_a_section_breaks(policy, capsys):
    def breaks(_):
        yield Figure("first", 1.0, "ms", TARGETS, note="quick")
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        report.run({"breaks": breaks}, ["breaks"], policy)
    assert capsys.readouterr().out == "| first | 1 ms | 3 / 2 / 1 | stretch | quick |\n"


def test_the_named_sections_run_in_order_and_a_missed_target_is_the_status(policy, capsys):
    sections = {
        "good": lambda _: [Figure("good", 2.0, "ms", TARGETS), Figure("free", 7.0)],
        "bad": lambda _: [Figure("bad", 9.0, "ms", TARGETS)],
    }
    assert report.verdict(report.run(sections, ["good"], policy), "a card") == 0
    assert "missed 0 of 1" in capsys.readouterr().out
    assert report.verdict(report.run(sections, ["bad", "good"], policy), "a card") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["|", "bad:", "|", "|", "good:", "paths:"]
    assert lines[7].startswith("a card, torch ") and lines[-1] == "missed 1 of 2"
    assert [line.split()[1] for line in lines[9:14]] == ["figure", "---", "bad", "good", "free"]


def test_the_cache_of_the_slice_keeps_its_bound():
    with torch.device("meta"):
        policy = Policy(official_widths())
    policy.norm.to_empty(device="cpu")  # the cache is allocated where this weight is
    figure = report.cache_bytes(policy)
    assert figure.value == 890 + 8 / 64 and figure.reached == "stretch"


@pytest.mark.parametrize("module", [model_gpu, model_gpu_slice])
def test_an_unknown_part_is_named_with_what_there_is(module, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark", "--parts", "decode,nonsense"])
    with pytest.raises(SystemExit):
        report.options(argparse.ArgumentParser(), module.SECTIONS)
    error = capsys.readouterr().err
    assert "unknown part 'nonsense'" in error and ", ".join(module.SECTIONS) in error
