"""The command line of `temper serve`; what it does is in `rl.serve.command`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.launch.folders import add_root

_EXAMPLES = """\
OpenAI's clients work against it, with the address it prints as their base URL:
  temper serve my-run                                    the newest checkpoint of a run
  temper serve runs/my-run/checkpoints/step-40           this one
  temper serve CHECKPOINT engine=vllm                    a model of transformers, with vLLM
  temper serve CHECKPOINT --host 0.0.0.0 --public --token-file ~/.tempering/serve.token
"""


def add_serve(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds `serve` to the parser of `temper`."""
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint or a run's policy to OpenAI's clients",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("target", help="a checkpoint folder, or a run's name or folder")
    serve.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE",
        help="engine=native or engine=vllm (default the run's, or native), and engine.vllm.*",
    )  # fmt: skip
    add_root(serve)
    serve.add_argument("--step", type=int, help="of a run: the checkpoint of this step (default the newest)")
    serve.add_argument(
        "--name", default="", help="the model's name in requests (default the run's or folder's)"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    serve.add_argument("--public", action="store_true", help="listen on an address that others can reach")
    serve.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="callers need the token in it as API key; made when it is not there. Needed with --public",
    )  # fmt: skip
    serve.add_argument("--tls-cert", type=Path, help="certificate chain (PEM): serve https")
    serve.add_argument("--tls-key", type=Path, help="its private key (PEM)")
    serve.add_argument("--max-requests", type=int, default=16, help="served at the same time (default 16)")
    serve.add_argument(
        "--context", type=int, help="most tokens of a conversation (default the run's or policy's)"
    )
    serve.add_argument("--effort", type=int, help="effort, 1 to 100, when a request names none")
    serve.add_argument("--threads", type=int, help="cores to compute with (default all)")
    serve.add_argument("--device", default="cpu", help="as in cuda (default cpu)")
    serve.add_argument("--packed", action="store_true", help="keep keys rounded, on pages: smaller caches")
    serve.add_argument(
        "--packed-experts", action="store_true",
        help="keep routed experts in the checkpoint's FP4: a quarter of their memory",
    )  # fmt: skip
    serve.add_argument("--speculate", action="store_true", help="let the policy's drafter draft")
    serve.add_argument(
        "--prefix-store", choices=("off", "memory", "disk"), default="off",
        help="keep beginnings of conversations there for later ones (default off)",
    )  # fmt: skip
    serve.add_argument(
        "--prefix-mb", type=int, default=1024, help="megabytes of them in memory (default 1024)"
    )
    serve.add_argument("--prefix-disk-mb", type=int, default=8192, help="and on disk (default 8192)")
    serve.add_argument("--prefix-folder", default="", help="on disk (default beside the checkpoint)")
    serve.add_argument(
        "--drain", type=float, default=30.0, help="seconds for answers to end at a stop (default 30)"
    )
    serve.set_defaults(action=_serve)


def _serve(parsed: argparse.Namespace, rest: Sequence[str]) -> int:
    from rl.engines.prefixes import PrefixSizes
    from rl.serve.command import run_server
    from rl.serve.options import ServeOptions
    from sandbox.serving import Bind

    sizes = PrefixSizes(
        memory_mb=parsed.prefix_mb, disk_mb=parsed.prefix_disk_mb, disk_folder=parsed.prefix_folder
    )
    if parsed.effort is not None and not 1 <= parsed.effort <= 100:
        raise ValueError(f"--effort is from 1 to 100, not {parsed.effort}")
    options = ServeOptions(
        target=parsed.target,
        root=parsed.root,
        step=parsed.step,
        name=parsed.name,
        max_requests=parsed.max_requests,
        context=parsed.context,
        effort=parsed.effort,
        threads=parsed.threads,
        device=parsed.device,
        packed=parsed.packed,
        packed_experts=parsed.packed_experts,
        speculate=parsed.speculate,
        prefix_store=parsed.prefix_store,
        prefix=sizes,
        bind=Bind(parsed.host, parsed.port, parsed.public, parsed.tls_cert, parsed.tls_key),
        token_file=parsed.token_file,
        settings=(*parsed.settings, *rest),
        drain_s=parsed.drain,
    )
    return run_server(options)
