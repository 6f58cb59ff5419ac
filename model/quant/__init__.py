"""Number formats of caches and checkpoints: exact codecs, and straight-through rounding for training."""
