"""The parts of one block: attention, mixture of experts, hyper-connections and the n-gram memory."""
