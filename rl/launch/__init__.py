"""From a command line to a run: the `temper` command, configuration, run folders, a check-up."""
