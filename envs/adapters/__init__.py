"""Adapters: task collections of others as environments of ours."""
