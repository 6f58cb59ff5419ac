"""What goes wrong in this architecture without any error: lost attention mass, replay, rounding, drafts, load.

Every function takes a policy and documents and returns a plain record; `python -m benchmarks.diagnose` runs
them all on a checkpoint. Nothing here changes the policy, and only the scale counters are meant for the middle
of training or serving.
"""
