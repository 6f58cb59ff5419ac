"""Layers: base, workspace and toolkit, each with a version of its own, composed into a root."""
