"""Number formats of caches and checkpoints: exact codecs, and the straight-through rounding used in training."""
