import pytest
import torch

from tests.model.engine.scripted import ScriptedPolicy


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def scripted_policy():
    return ScriptedPolicy()
