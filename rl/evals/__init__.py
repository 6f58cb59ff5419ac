"""Evaluation of any checkpoint: sampled as in training, every row kept, with intervals and costs."""
