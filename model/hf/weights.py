"""What is published of a policy: its tensors as files on a model hub have them.

In memory `transformers` may hold several tensors of a file as one (the experts of a layer), and a policy may
have adapters. Other engines load what stands in files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.hf.adapters import merged_state
from model.hf.policy import HFPolicy, tied_names


@torch.no_grad()
def published(policy: HFPolicy) -> dict[str, Tensor]:
    """All weights by the names, shapes and dtypes of a plain folder: adapters added in, tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    model = policy.model
    state = model.state_dict() if policy.lora is None else merged_state(model)
    tied = tied_names(model)
    state = {name: value.detach() for name, value in state.items() if name not in tied}
    return {name: value.contiguous() for name, value in revert_weight_conversion(model, state).items()}
