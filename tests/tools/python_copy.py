"""Copies in which faults are planted in pyattn.distributed, with the native libraries of the installed pyattn."""

import shutil
from pathlib import Path

from source_copy import SourceCopy

from pyattn import _build

LIKELY = {
    "attention.py": ("attention",),
    "cache_call.py": ("cached",),
    "cache_operator.py": ("compiled",),
    "cache_part.py": ("cached",),
    "call.py": ("refusals", "context", "attention"),
    "context.py": ("context",),
    "layout.py": ("trips", "attention"),
    "merging.py": ("cached",),
    "operators.py": ("compiled",),
    "packing.py": ("trips", "attention"),
    "parsed.py": ("refusals", "compiled", "attention"),
    "ranks.py": ("refusals",),
    "ring.py": ("attention",),
    "rows.py": ("attention", "cached"),
    "sequence_operator.py": ("compiled",),
    "shares.py": ("attention",),
    "states.py": ("tensor_parallel",),
    "stream.py": ("trips", "attention"),
    "tensor_parallel.py": ("tensor_parallel",),
    "tensors.py": ("tensors",),
    "trips.py": ("trips", "attention"),
    "ulysses.py": ("attention",),
    "usp.py": ("attention",),
}
"""The tests most likely to catch a fault, by its file in pyattn/distributed; they run first."""
TESTS = ("attention", "cached", "compiled", "context", "refusals", "tensors", "tensor_parallel", "trips")
RUN = """
import sys
from pathlib import Path
copy = Path(sys.argv[1])
import pyattn, pytest
assert Path(pyattn.__file__).is_relative_to(copy), pyattn.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


class PythonCopy(SourceCopy):
    """A copy without a native build. A fault on ranks may hang; it is caught if the ranks then raise by themselves."""

    run_tests = RUN
    idle = 150  # a rank of the tests' pool waits for another for 60 s, and the next call for as long

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        installed = Path(_build.__file__).parent  # an editable install has it, and the libraries, apart from the source
        for path in (*installed.glob("*.so"), installed / "_build.py"):
            shutil.copy2(path, folder / "pyattn")

    def caught_by(self, file: str) -> str | None:
        """The first test that fails; a run that hangs is none."""
        likely = LIKELY.get(Path(file).name, ())
        for names in (likely, tuple(name for name in TESTS if name not in likely)):
            by = self.first_failure(*(f"tests/distributed/test_{name}.py" for name in names)) if names else None
            if by:
                return None if by == "hangs" else by
        return None
