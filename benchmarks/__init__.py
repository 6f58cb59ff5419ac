"""What the project publishes as figures: each file prints its own, last, and exits non-zero on a miss."""
