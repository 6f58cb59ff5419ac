"""A program: loads a folder into vLLM's class for our network, on the meta device, and says how that went.

    PYTHONPATH=... python load_on_meta.py FOLDER TENSOR:DIMENSION...

It prints JSON: the parameters of vLLM's model with shape and type, for every stored tensor the parameters
that took it, or the error, and the same for the named ones with that dimension one too long. vLLM is used as
it is: a kernel for the CPU and the published quantisation are registered by its own calls, `described_gpu`
describes the card, and what torch would ask of a driver or processor is answered here.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open


def describe_driver():
    card = SimpleNamespace(
        name="described", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37,
        L2_cache_size=50 << 20, warp_size=32,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda *_: card
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    # vLLM's experts for the CPU ask for a processor with tiles, which not every machine has.
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.cuda.Stream = torch.cuda.Event = lambda *_, **__: None
    plain = torch.empty

    def on_meta(*shape, **options):
        options.pop("pin_memory", None)
        return plain(*shape, **{**options, "device": "meta"})

    torch.empty = on_meta


def configure(folder):
    kernels = import_module("vllm.model_executor.kernels.linear")
    cpu = import_module("vllm.platforms.interface").PlatformEnum.CPU
    kernels.register_linear_kernel(kernels.EmulationMxfp8LinearKernel, cpu, "mxfp8")
    quantization = import_module("vllm.model_executor.layers.quantization")
    quantization.register_quantization_config("deepseek_v4_fp8")(
        import_module("vllm.models.deepseek_v41.quant_config").DeepseekV4FP8Config
    )
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=str(folder), skip_tokenizer_init=True, quantization="deepseek_v4_fp8", load_format="dummy",
        enforce_eager=True, max_model_len=128,
    )  # fmt: skip
    return arguments.create_engine_config()


def make_model(config, meeting):
    distributed = import_module("vllm.distributed")
    distributed.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
    distributed.ensure_model_parallel_initialized(1, 1)
    kind = import_module("vllm.models.deepseek_v41").DeepseekV41ForCausalLM
    describe_driver()
    torch.set_default_dtype(config.model_config.dtype)
    with torch.device("meta"):
        return kind(vllm_config=config)


def offer(model, name, tensor):
    try:
        return {"into": sorted(model.load_weights([(name, tensor)]))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def longer(tensor, dimension):
    shape = list(tensor.shape)
    shape[dimension] += 1
    return tensor.new_empty(shape)


def main():
    folder, wrong = Path(sys.argv[1]), dict(word.split(":") for word in sys.argv[2:])
    config = configure(folder)
    with import_module("vllm.config").set_current_vllm_config(config):
        model = make_model(config, folder / f"meeting-{os.getpid()}")
        parameters = {name: [list(p.shape), str(p.dtype)] for name, p in model.named_parameters()}
        tensors, refused = {}, {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118
                    tensor = stored.get_tensor(name).to("meta")
                    told = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}
                    tensors[name] = {**told, **offer(model, name, tensor)}
                    if name in wrong:
                        refused[name] = offer(model, name, longer(tensor, int(wrong[name])))
        devices = sorted({p.device.type for p in model.parameters()})
    print(json.dumps({"parameters": parameters, "tensors": tensors, "refused": refused, "devices": devices}))


main()
