"""Bytes of cache a token over the generations of the family, each from its own formula.

- V1 (67B): 95 layers of grouped-query attention, 8 key and 8 value heads of 128 in bfloat16:
  2 * 8 * 128 * 2 * 95 = 389,120.
- V2: multi-head latent attention, a latent of 512 and a rotary key of 64 in bfloat16, 60 layers: 69,120.
- V3: the same in 61 layers: 70,272.
- V3.2: an FP8 latent record of 656 bytes (512 codes, 4 float32 scales, 64 rotary channels in bfloat16) and an
  index key of 132 bytes (128 codes, a float32 scale), 61 layers: 48,068.
- V4-Flash: 21 of 43 layers keep one record per 4 tokens, with an index key, and 20 one per 128 tokens,
  without; a record has 584 bytes (448 FP8 channels, 64 in bfloat16, 8 bytes of scales), an index key in FP4
  68.
- The policy's: one main and one index record per group of each source of keys, with the sizes of the caches.

Windows, whose size does not grow with the sequence, and open groups are left out everywhere. Sources: the
technical reports and configurations of the models, and the record layouts of their public attention kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.cache.records import INDEX, MAIN
from model.config import PolicyConfig


@dataclass(frozen=True, slots=True)
class Generation:
    """Cache bytes a token of one model."""

    name: str
    bytes_per_token: float


def policy_bytes(config: PolicyConfig) -> float:
    """Cache bytes a token of a policy with packed caches: 890 for the released configuration."""
    entry = sum(
        record.code_bytes(width) + record.scale_bytes(width)
        for record, width in ((MAIN, config.head_dim), (INDEX, config.index_head_dim))
    )
    return sum(entry / config.ratio(layer) for layer in config.kv_source_layer_ids)


def generations(config: PolicyConfig) -> tuple[Generation, ...]:
    """The table, with the released configuration and `config` last."""
    bfloat16, index_fp4 = 2, 128 // 2 + 128 // 32
    latent = (512 + 64) * bfloat16
    fp8_latent, fp8_index = 512 + 4 * 4 + 64 * bfloat16, 128 + 4
    fp8_record = 448 + 64 * bfloat16 + 8
    return (
        Generation("V1 67B", 2 * 8 * 128 * bfloat16 * 95),
        Generation("V2", latent * 60),
        Generation("V3", latent * 61),
        Generation("V3.2", (fp8_latent + fp8_index) * 61),
        Generation("V4-Flash", 21 * (fp8_record + index_fp4) / 4 + 20 * fp8_record / 128),
        Generation("V4.1-Flash", policy_bytes(PolicyConfig.preset("official"))),
        Generation("this policy", policy_bytes(config)),
    )
