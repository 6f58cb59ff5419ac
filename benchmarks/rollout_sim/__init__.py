"""Seven ways to schedule rollouts, on identical traces, in virtual time; run it as a module."""
