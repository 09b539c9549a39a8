"""Promise: if a rank raises, exits or is killed within a call, the others raise; none waits forever."""

from itertools import product
from pathlib import Path

import pytest
import torch
from support import fresh
from support.ranks import failing

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

FUNCTIONS = ("ring_attention", "ulysses_attention", "usp_attention", "attention_with_cache")
CASES = [*product(FUNCTIONS, ("forward", "backward"))]


@pytest.mark.parametrize(("end", "seconds"), [("raise", 4), ("exit", 60), ("kill", 60)])
def test_a_rank_that_fails(end: str, seconds: int, tmp_path: Path) -> None:
    """After the group's timeout if it lives, and at once if it does not."""
    mine, theirs = fresh.CONTEXT.Pipe()
    process = fresh.CONTEXT.Process(target=failing.outcomes, args=(CASES, end, seconds, str(tmp_path), theirs))
    process.start()
    theirs.close()
    assert mine.poll(fresh.LONGEST)
    found = dict(zip(CASES, mine.recv(), strict=True))
    process.join()
    own = "ArithmeticError" if end == "raise" else end
    for (name, phase), statuses in found.items():
        others = ["RuntimeError"] * (2 if name == "usp_attention" else 1)
        assert statuses == ["RuntimeError", own, *others], (name, phase)
