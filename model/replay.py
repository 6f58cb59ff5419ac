"""Which tokens have to be run so that a sequence can go on, when not all of them are.

A token's state depends on the window before it, in every layer anew: a half of n layers is exact from n
windows after the token it starts at. Bounded replay starts one window back and takes the difference, exact
replay starts the whole chain back, and "off" runs every layer on every token.
"""

from __future__ import annotations

from typing import Literal

from model.config import PolicyConfig

Replay = Literal["bounded", "exact", "off"]


def decode_from(config: PolicyConfig, replay: Replay, end: int) -> int:
    """Where the decoder starts so that a sequence can go on at position `end`."""
    start = config.decoder_start
    if replay == "off" or start is None:
        return 0
    if replay == "bounded":
        return max(0, end - config.sliding_window)
    return max(0, end - 1 - (config.num_hidden_layers - start) * (config.sliding_window - 1))


def resume_from(config: PolicyConfig, replay: Replay, cached: int, end: int) -> int:
    """Where to resume a sequence that has the compressed keys of `cached` tokens but no windows.

    Args:
        config: gives layers and window.
        replay: bounded fills the encoder's windows from one window back, exact restores them as they were,
            off runs all tokens once more.
        cached: tokens whose compressed keys there are.
        end: where the tokens to run end, `cached` or later.
    """
    if replay == "off":
        return 0
    if replay == "bounded":
        return max(0, cached - config.sliding_window)
    layers = config.num_hidden_layers if config.decoder_start is None else config.decoder_start
    first = min(cached, decode_from(config, replay, end)) if config.decoder_start is not None else cached
    return max(0, first - layers * (config.sliding_window - 1))
