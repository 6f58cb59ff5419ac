"""Layers: base, workspace and toolkit, each with a version of its own, composed into the root of a sandbox."""
