"""Promise: DTensors sharded over the batch or over heads give the results of whole tensors."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from support import fresh
from support.ranks import sharded


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes(tmp_path: Path) -> None:
    arguments = 2, str(tmp_path / "rendezvous")
    torch.multiprocessing.start_processes(sharded.compare, arguments, 2, start_method=fresh.CONTEXT.get_start_method())
