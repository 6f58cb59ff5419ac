"""The second stream, where there is none: work runs in turn."""

import torch

from model.ops.side import SideStream, arrivals


def test_on_a_processor_work_runs_in_turn_and_counters_are_one_tensor_of_zeros():
    side, device = SideStream(torch.device("cpu")), torch.device("cpu")
    assert side.run(lambda: 3) == 3
    side.join()
    first = arrivals(device, 5)
    assert first.dtype is torch.int32 and not first.any()
    assert arrivals(device, 7).data_ptr() == first.data_ptr()
