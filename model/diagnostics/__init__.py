"""What goes wrong in this architecture without an error: lost attention mass, rounding, replay, drafts, load.

Every function takes a policy and documents and returns a plain record; `python -m benchmarks.diagnose` runs
them all on a checkpoint. Nothing here changes the policy. Only the scale monitor is meant to run in the midst
of training or serving.
"""
