"""The policy network and its inference engine: a causal encoder-decoder with compressed sparse attention."""
