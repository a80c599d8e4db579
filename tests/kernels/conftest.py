"""Kernel tests run on one thread, so that their bytes and times do not depend on the machine's load."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
