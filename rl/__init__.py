"""Everything that learns: rollouts, algorithms, trainers, and the loop that joins them.

It is the top of the house (`rl -> rewards -> envs -> sandbox` and `rl -> model`): nothing below imports it.
"""
