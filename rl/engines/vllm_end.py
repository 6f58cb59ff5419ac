"""Ends vLLM's processes with the one that started them, also when that one is killed.

vLLM loads it as a plugin in each of its processes, so there is no moment at which a core could be left over.
"""

from __future__ import annotations

import ctypes
import os
import signal

PARENT = "TEMPERING_VLLM_PARENT"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Lets this process be killed when the one that `PARENT` names ends; vLLM calls it in each of its own."""
    if str(os.getppid()) != os.environ.get(PARENT):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ[PARENT]:
        os._exit(1)  # it ended just before
