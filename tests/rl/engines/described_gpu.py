"""A platform for vLLM, found by its entry point: the CPU, that says what a graphics card is capable of.

vLLM's classes for graphics cards choose by that what they make. Nothing is computed on it.
"""

from importlib import import_module


def platform():
    return "described_gpu.DescribedGpu"


class DescribedGpu(import_module("vllm.platforms.cpu").CpuPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return import_module("vllm.platforms.interface").DeviceCapability(9, 0)
