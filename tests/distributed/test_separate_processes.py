"""Promise: ranks whose processes share nothing, as torchrun starts them, send their messages in the same order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import fresh

SIZE = 3


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_other_hashes_of_strings(tmp_path: Path) -> None:
    """Python draws these in each process, and they decide the order of a set. The pool's ranks, forks, share them."""
    command = [sys.executable, "-m", "support.ranks.separate"]
    known = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(tmp_path / "rendezvous")], env=known | {"PYTHONHASHSEED": str(rank)}
        )
        for rank in range(SIZE)
    ]
    try:
        assert [rank.wait(fresh.LONGEST) for rank in ranks] == [0] * SIZE
    finally:
        for rank in ranks:
            rank.kill()
