"""Promise: converted models train under DistributedDataParallel and fully_shard as the plain model does alone."""

import pytest
import torch
from support.ranks import converted
from support.ranks.pool import pool

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


@pytest.mark.parametrize("converted_first", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", converted.MODELS)
def test_steps(name: str, kind: str, reentrant: bool | None, converted_first: bool) -> None:
    pool().run(2, converted.compare, name, kind, reentrant, converted_first)
