"""How token losses become one number, independent of how the batch is cut into micro-batches.

Every mode gives all tokens of a sequence one weight, computed once over the whole batch. The batch's loss is
the weighted sum of its token losses; micro-batches and ranks add their parts, and nobody divides again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from rl.algorithms.registry import AlgorithmError

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean")


def sequence_weights(
    mode: str,
    lengths: Sequence[int],
    responses: Sequence[Hashable] | None = None,
    prompts: Sequence[Hashable] | None = None,
    *,
    max_length: int | None = None,
) -> np.ndarray:
    """Returns the weight of each token of each sequence, float64 [n].

    Args:
        mode: `token_mean` divides by all tokens (DAPO); `seq_mean_token_mean` is the mean over responses of
            their token means (GRPO); `seq_mean_token_sum` the mean of their sums; `seq_mean_token_sum_norm`
            that divided by the constant `max_length` (Dr. GRPO); `prompt_mean` the mean over prompts of
            token means. A response or prompt without a trained token does not count.
        lengths: trained tokens of each sequence; all of the batch, those without a loss included.
        responses: the response each sequence is part of (one that branched has several); default: its own.
        prompts: the prompt each sequence answers; needed by `prompt_mean`.
        max_length: the constant of `seq_mean_token_sum_norm`.
    """
    counts = np.asarray(lengths, dtype=np.float64)
    response_of = _indices(range(len(counts)) if responses is None else responses, len(counts))
    if mode == "token_mean":
        return np.full(len(counts), 1 / max(counts.sum(), 1.0))
    if mode == "prompt_mean":
        if prompts is None:
            raise AlgorithmError("aggregation prompt_mean needs the prompt of each sequence")
        return _mean_of_means(counts, _indices(prompts, len(counts)))
    if mode == "seq_mean_token_mean":
        return _mean_of_means(counts, response_of)
    per_response = 1 / max(int((np.bincount(response_of, counts) > 0).sum()) if len(counts) else 0, 1)
    if mode == "seq_mean_token_sum":
        return np.full(len(counts), per_response)
    if mode == "seq_mean_token_sum_norm":
        if not max_length:
            raise AlgorithmError(
                "aggregation seq_mean_token_sum_norm needs max_length, the constant it divides by"
            )
        return np.full(len(counts), per_response / max_length)
    raise AlgorithmError(f"unknown aggregation {mode!r}; there are {', '.join(MODES)}")


def _mean_of_means(counts: np.ndarray, owner: np.ndarray) -> np.ndarray:
    totals = np.bincount(owner, counts) if len(counts) else np.zeros(0)
    owners = max(int((totals > 0).sum()), 1)
    return 1 / (np.maximum(totals[owner], 1.0) * owners)


def _indices(keys: Sequence[Hashable], count: int) -> np.ndarray:
    if len(keys) != count:
        raise ValueError(f"{len(keys)} keys for {count} sequences; there must be one each")
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)
