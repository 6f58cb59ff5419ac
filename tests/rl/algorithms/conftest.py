from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

from rl.algorithms import LossInputs

settings.register_profile("numeric", deadline=None, max_examples=50)
settings.load_profile("numeric")


@pytest.fixture
def make_inputs() -> Callable[..., LossInputs]:
    """Builds LossInputs from lists; what is not given is on-policy, unmasked, one sequence."""

    def make(logprobs, **fields) -> LossInputs:
        logprobs = torch.as_tensor(logprobs, dtype=torch.float32)
        count = len(logprobs)
        old = torch.as_tensor(fields.pop("old_logprobs", logprobs.detach().clone()), dtype=torch.float32)
        sampler = torch.as_tensor(fields.pop("sampler_logprobs", old.clone()), dtype=torch.float32)
        advantages = torch.as_tensor(fields.pop("advantages", torch.ones(count)), dtype=torch.float32)
        mask = torch.as_tensor(fields.pop("mask", [True] * count)).bool()
        segment_ids = torch.as_tensor(fields.pop("segment_ids", [0] * count))
        versions = torch.as_tensor(fields.pop("versions", [0] * count))
        return LossInputs(
            logprobs=logprobs,
            sampler_logprobs=sampler,
            old_logprobs=old,
            advantages=advantages,
            mask=mask,
            versions=versions,
            segment_ids=segment_ids,
            segments=int(segment_ids.max()) + 1 if count else 0,
            current_version=fields.pop("current_version", 0),
            **fields,
        )

    return make
