"""The fleet: sandboxes in which agents act, held by a node of their own, used through one SDK."""
