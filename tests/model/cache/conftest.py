import shutil
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def memory_folder():
    folder = Path(tempfile.mkdtemp(prefix="prefix-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
