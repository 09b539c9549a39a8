"""Promise: text that a planted fault quotes stands once in its file, so a change that forgets the quotation fails."""

from pathlib import Path

import pytest
from faults import parse, place

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/tools/planted_faults*.txt")), ids=lambda path: path.stem)
def test_quotations(path: Path) -> None:
    faults = parse(path.read_text())
    assert faults
    for fault in faults:
        place(ROOT, fault)
