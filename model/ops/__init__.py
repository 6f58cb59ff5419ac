"""Fused operations of the policy: each is one public function with a PyTorch definition and a Triton kernel.

A package `model.ops.<op>` exports one function. `reference.py` is the definition and runs anywhere;
`triton.py` is imported only when the arguments are on a CUDA device, because Triton is an optional
dependency.
"""
