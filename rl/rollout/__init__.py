"""Rollouts that lose nothing: dispatch, episodes, the token log, recovery, the buffer before training.

The parts are plain classes without processes of their own. `Dispatcher` and `Buffer` are pure state
machines on the trainer's side; `Generator` is what the process beside the engine runs: workers, token log,
sandboxes.
"""
