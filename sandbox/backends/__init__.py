"""The ways to isolate a sandbox."""
