"""From a command line to a run: the `temper` command, configuration, run folders, and checks of the machine."""
