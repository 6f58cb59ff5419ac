"""The process inside a sandbox that answers for it."""
