import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def memory_folder():
    folder = Path(tempfile.mkdtemp(prefix="prefix-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
