"""Copies in which faults are planted in Python code, with the native libraries of the installed pyattn."""

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
    "checks.py": ("wrong_arguments", "refusals"),
    "context.py": ("context",),
    "layout.py": ("trips", "attention"),
    "merging.py": ("cached",),
    "operators.py": ("compiled",),
    "packing.py": ("trips", "attention"),
    "parsed.py": ("refusals", "compiled", "attention"),
    "ranks.py": ("refusals",),
    "ring.py": ("attention",),
    "rows.py": ("infinite", "attention", "cached"),
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
OF_RANKS = (
    "attention",
    "cached",
    "compiled",
    "context",
    "infinite",
    "neighbours",
    "refusals",
    "tensors",
    "tensor_parallel",
    "trips",
    "wrong_arguments",
)
OTHERS = {
    "pyattn/adapters/flash_attn/": ("adapters/flash_attn",),
    "pyattn/adapters/flex/": ("adapters/flex",),
    "pyattn/adapters/sdpa": ("adapters/sdpa",),
    "pyattn/adapters/transformers": ("adapters/transformers",),
    "pyattn/takers": ("distributed/test_neighbours.py",),
    "pyattn/": (
        "attention/test_infinite_parts.py",
        "attention/test_merge.py",
        "attention/test_max_score.py",
        "cache/test_copies.py",
        "masks/test_one_row.py",
        "varlen",
    ),
}
"""The tests of other files, by how their paths begin; the first that fits holds."""
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
        for names in _runs(file):
            if by := self.first_failure(*(f"tests/{name}" for name in names)):
                return None if by == "hangs" else by
        return None


def _runs(file: str) -> list[tuple[str, ...]]:
    """The tests of a file, the likely ones first; all for no file."""
    of_ranks = tuple(f"distributed/test_{name}.py" for name in OF_RANKS)
    if not file:
        return [of_ranks, *OTHERS.values()]
    if not file.startswith("pyattn/distributed/"):
        return [next(tests for begin, tests in OTHERS.items() if file.startswith(begin))]
    likely = tuple(f"distributed/test_{name}.py" for name in LIKELY.get(Path(file).name, ()))
    return [names for names in (likely, tuple(name for name in of_ranks if name not in likely)) if names]
