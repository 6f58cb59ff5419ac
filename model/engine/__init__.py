"""The inference engine: continuous batching, sampling and interruption at any token.

`Engine` is the synchronous core; who wants tokens asynchronously runs it in a thread. Errors stand in
`model.engine.errors`.
"""
