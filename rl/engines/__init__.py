"""Inference engines as a rollout sees them: `base.Engine` is the interface, `native.NativeEngine` is ours."""
