"""Copies in which faults are planted in Python code, with the native libraries of the installed pyattn."""

import shutil
from pathlib import Path

from source_copy import SourceCopy

from pyattn import _build

LIKELY = {
    "attention.py": ("attention",),
    "cache/call.py": ("cached",),
    "cache/operator.py": ("compiled",),
    "cache/local_keys.py": ("cached",),
    "agreement/call.py": ("refusals", "context", "attention"),
    "agreement/checks.py": ("wrong_arguments", "refusals"),
    "context_parallel.py": ("context",),
    "layout.py": ("routes", "attention"),
    "cache/merge.py": ("cached",),
    "compiled/operator.py": ("compiled",),
    "sequence_layout.py": ("routes", "attention"),
    "agreement/local_options.py": ("refusals", "compiled", "attention"),
    "agreement/ranks.py": ("refusals",),
    "agreement/signature.py": ("refusals",),
    "ring/ring_attention.py": ("attention",),
    "partial_results.py": ("infinite", "attention", "cached"),
    "compiled/sequence_operator.py": ("compiled",),
    "ring/chunk_attention.py": ("attention",),
    "tensor_parallel/state_dict.py": ("tensor_parallel",),
    "ring/messages.py": ("routes", "attention"),
    "tensor_parallel/modules.py": ("tensor_parallel",),
    "dtensor.py": ("tensors",),
    "ring/routes.py": ("routes", "attention"),
    "ulysses.py": ("attention",),
    "usp.py": ("attention",),
}
"""The tests most likely to catch a fault, by its path in pyattn/distributed; they run first."""
OF_RANKS = (
    "attention",
    "cached",
    "compiled",
    "context",
    "infinite",
    "neighbours",
    "refusals",
    "routes",
    "tensors",
    "tensor_parallel",
    "wrong_arguments",
)
OTHERS = {
    "pyattn/adapters/flash_attn/": ("adapters/flash_attn",),
    "pyattn/adapters/flex/": ("adapters/flex",),
    "pyattn/adapters/sdpa": ("adapters/sdpa",),
    "pyattn/adapters/transformers": ("adapters/transformers",),
    "pyattn/options/axes": ("options", "distributed/test_every_option.py", "distributed/test_attention.py"),
    "pyattn/options/positions": ("options", "distributed/test_attention.py", "distributed/test_cached.py"),
    "pyattn/options/selected_keys": ("weights/test_listed_weights.py", "attention/test_selected.py"),
    "pyattn/options/tensor_types": ("distributed/test_neighbours.py",),
    "pyattn/prefix/": ("prefix",),
    "pyattn/cache/shared_pages": ("pages/test_shared_pages.py",),
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
LOCKED = (
    "pyattn/adapters/flash_attn/rotary_embedding.py",
    "pyattn/adapters/flex/compiled/masks.py",
    "pyattn/adapters/flex/compiled/programs.py",
    "pyattn/adapters/tally.py",
    "pyattn/adapters/torch_varlen.py",
    "pyattn/derivatives/autograd.py",
    "pyattn/ops/row_invariance.py",
    "pyattn/options/polarity.py",
)
"""Files with a lock: the tests of threads run before the others."""
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

    def tests(self) -> set[str]:
        files = ("", *LOCKED, *(f"pyattn/distributed/{name}" for name in LIKELY))
        return {test for file in files for tests in _runs(file) for test in tests}

    def caught_by(self, file: str) -> str | None:
        """The first test that fails; a run that hangs is none."""
        for tests in _runs(file):
            if by := self.first_failure(*tests):
                return None if by == "hangs" else by
        return None


def _runs(file: str) -> list[list[str]]:
    """The tests of a file, the likely ones first; all for no file."""
    of_ranks = [f"distributed/test_{name}.py" for name in OF_RANKS]
    if not file:
        runs = [of_ranks, *map(list, OTHERS.values())]
    elif file.startswith("pyattn/distributed/"):
        likely = [f"distributed/test_{name}.py" for name in LIKELY.get(file.removeprefix("pyattn/distributed/"), ())]
        runs = [likely, [name for name in of_ranks if name not in likely]]
    else:
        threads = [["threads"]] if file in LOCKED else []
        runs = [*threads, next(list(tests) for begin, tests in OTHERS.items() if file.startswith(begin))]
    return [[f"tests/{name}" for name in names] for names in runs if names]
