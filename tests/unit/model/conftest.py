"""A process group of one for the tests of the model, which megatron-core's layers need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from model_cases import make_config

from refusion_train.parallel.groups import Groups, destroy, init_groups


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    """This process alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    yield init_groups(make_config())
    destroy()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
