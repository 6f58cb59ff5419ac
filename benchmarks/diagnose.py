"""Looks for the ways in which this architecture breaks without an error.

    python -m benchmarks.diagnose CKPT [--tokens N] [--length L] [--data FILE] [--json FILE] [--plot FILE]

CKPT is a checkpoint folder or the name of a preset (nano, pico), whose weights are then drawn from `--seed`.
Documents are the policy's own unless `--data` names a file with one JSON list of token ids a line. Printed
are: the attention mass that candidate pool and selections miss, by layer and by distance; what rounded caches
do to the logits; scales at the ends of their range; what bounded replay costs and gets wrong; acceptance of
drafts; expert load; bytes of cache a token. The last line is the share of dense attention mass on main keys
that the layers keep. The exit status is 1 when any figure is not finite.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.diagnose_data import NotFiniteError, open_policy, pack, read_documents, write_documents
from benchmarks.diagnose_plot import draw
from benchmarks.diagnose_tables import print_all
from model.batch import PackedTokens
from model.diagnostics.cache_bytes import generations
from model.diagnostics.cache_error import cache_error
from model.diagnostics.drafter import draft_acceptance
from model.diagnostics.experts import expert_load
from model.diagnostics.recall import LayerRecall, recall
from model.diagnostics.replay_cost import measured_costs, parameter_costs, turn_cost
from model.diagnostics.replay_error import replay_errors
from model.diagnostics.scales import ScaleMonitor
from model.policy import Policy

TURNS = (16, 128, 512, 2048, 8192)
MISS_RATES = (0.01, 0.1, 0.5, 1.0)


def diagnose(policy: Policy, tokens: PackedTokens, length: int, seed: int, generated: int) -> dict[str, Any]:
    """All figures, by subject."""
    config = policy.config
    policy.fake_quant = True
    with torch.no_grad(), ScaleMonitor(policy) as monitor:
        policy(tokens)
    costs = {"parameters": parameter_costs(config)}
    if config.decoder_start is not None:
        costs["measured"] = measured_costs(policy, length)
    window = config.sliding_window
    figures: dict[str, Any] = {
        "recall": recall(policy, tokens),
        "cache_error": cache_error(policy, tokens),
        "scales": monitor.counter.counts(),
        "token_costs": costs,
        "turns": {
            name: [turn_cost(cost, window, new, generated, rate) for new in TURNS for rate in MISS_RATES]
            for name, cost in costs.items()
        },
        "experts": expert_load(policy, tokens),
        "cache_bytes": generations(config),
    }
    prompt = min(4 * window, length - 8)
    if config.decoder_start is not None and prompt > window:
        own = write_documents(policy, 4, prompt + 8, seed)
        figures["replay_error"] = replay_errors(policy, own, prompt)
    if policy.mtp is not None:
        own = write_documents(policy, 4, min(length, 64 + config.dspark_block_size), seed, greedy=True)
        figures["drafter"] = draft_acceptance(policy, own)
    return figures


def selection_recall(layers: tuple[LayerRecall, ...]) -> float:
    """Share of dense attention mass on main keys that all layers together attend to; 1 without main keys."""
    mass = sum(layer.mass for layer in layers)
    return sum(layer.mass * layer.selected for layer in layers) / mass if mass else 1.0


def plain(value: Any) -> Any:
    """`value` as nested JSON values; floats that are not finite as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def not_finite(value: Any, path: str = "") -> Iterator[str]:
    """Paths of the figures in a nested record that are not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from not_finite(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from not_finite(item, f"{path}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield path


def _arguments() -> tuple[argparse.Namespace, Policy, PackedTokens]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a checkpoint folder, or nano or pico")
    parser.add_argument("--seed", type=int, default=0, help="of a preset's weights and of own documents")
    parser.add_argument("--tokens", type=int, default=2048, help="how many to look at in all")
    parser.add_argument("--length", type=int, default=256, help="of a document")
    parser.add_argument("--generated", type=int, default=128, help="tokens sampled in a turn, for the cost")
    parser.add_argument("--data", type=Path, help="documents: one JSON list of token ids a line")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw the figures here")
    arguments = parser.parse_args()
    if arguments.length < 2 or arguments.tokens < arguments.length or arguments.generated < 0:
        parser.error("need --length of at least 2, --tokens of at least --length, --generated of at least 0")
    try:
        policy = open_policy(arguments.checkpoint, arguments.seed)
        policy.fake_quant = True
        if arguments.data is None:
            count = arguments.tokens // arguments.length
            documents = list(write_documents(policy, count, arguments.length, arguments.seed))
        else:
            vocab = policy.config.vocab_size
            documents = read_documents(arguments.data, vocab, arguments.tokens, arguments.length)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return arguments, policy, pack(documents)


def main() -> int:
    """Measure, print, and write what is asked for."""
    torch.set_num_threads(1)
    try:
        arguments, policy, tokens = _arguments()
        figures = diagnose(policy, tokens, arguments.length, arguments.seed, arguments.generated)
    except NotFiniteError as error:
        print(error)
        print("selection_recall nan")
        return 1
    print_all(figures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(plain(figures), indent=1, allow_nan=False))
    if arguments.plot is not None:
        draw(figures, arguments.plot)
    wrong = list(not_finite(figures))
    if wrong:
        print(f"{len(wrong)} figures are not finite: {', '.join(wrong[:8])}")
    print(f"selection_recall {selection_recall(figures['recall']):.4f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
