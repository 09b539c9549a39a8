"""Prints the registers and spills of CUDA kernels from a build log, and fails above a limit: ``cuda_resources.py LOG``.

Registers that a kernel has no room for are spilled to memory. A few spilled words that are read once in a tile's
thousands of instructions have no measurable cost; sums that are spilled inside a product slow it down. MOST_SPILLED
lies between the two. (The log does not show dynamic shared memory: the source asserts each kernel's.)
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_SPILLED = 192
"""Bytes of stores: 48 of a lane's 255 registers, the most that a kernel spills. Those that spilled sums had 600. The
pass over keys by warpgroups spills 188 at 128 columns; 68 if it waited for each product, which takes 5 % longer."""

ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for 'sm_(?P<arch>\w+)'.*?(?P<stores>\d+) bytes spill stores.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)
KERNEL = re.compile(
    r"\d((?:float64_)?(?:forward(?:_together)?|backward_(?:keys|queries|bias|relative))|row_terms|round_queries|sum_rows|sum_relative"
    r"|mask_rows|mask_blocks|place_sequences|fill_rest|merge_splits|decode)I(.*?)EE?v"
)
OBJECT = re.compile(r"(?=cuda_(?:batch|packed)_\w+\.dir)")
"""The beginning of an object's log: kernels for batches and for packed sequences have the same names."""


def readable(mangled: str) -> str:
    """A mangled name as ``forward<f16, 128>``; ``general`` stands for scores that are not plain."""
    found = KERNEL.search(mangled)
    if not found:
        return mangled
    name, arguments = found.groups()
    dtype = re.match(r"[NS0-9_]*(bf16|f16|f|d)", arguments)
    dims = re.findall(r"Li(\d+)E", arguments)[:1]
    flag = ["split" if name == "forward" else "adding"] if "Lb1E" in arguments else []
    general = ["general"] if "7General" in arguments else []
    return f"{name}<{', '.join([dtype[1] if dtype else '?', *dims, *flag, *general])}>"


def entries_of(log: str) -> Iterator[dict[str, str]]:
    """The log's entry of each kernel for each architecture."""
    for part in OBJECT.split(log):
        packed = "packed " if part.startswith("cuda_packed") else ""
        for entry in ENTRY.finditer(part):
            yield entry.groupdict() | {"name": packed + readable(entry["name"])}


def by_number(arch: str) -> tuple[int, str]:
    """A sort key for architectures: 90, 90a, 120."""
    return int(arch.rstrip("af")), arch


def of_all(name: str, row: dict[str, str], archs: list[str]) -> bool:
    """Whether a kernel is there for each architecture. Hopper (90a) has separate kernels of 16 bits."""
    if set(row) == {"90a"}:
        return True
    apart = {"90", "90a"} if "bf16" in name or "f16" in name else {"90a"}
    return set(archs) - apart <= set(row)


def main() -> int:
    entries = list(entries_of(Path(sys.argv[1]).read_text()))
    archs = sorted({entry["arch"] for entry in entries}, key=by_number)
    table: dict[str, dict[str, str]] = {}
    for entry in entries:
        spilled = f"+{entry['stores']}" if entry["stores"] != "0" else ""
        table.setdefault(entry["name"], {})[entry["arch"]] = entry["registers"] + spilled
    print(f"{'registers, + bytes spilled':50}" + "".join(f"{'sm_' + arch:>9}" for arch in archs))
    for name, row in sorted(table.items()):
        print(f"{name:50}" + "".join(f"{row.get(arch, 'missing'):>9}" for arch in archs))
    worst = max((int(entry["stores"]) for entry in entries), default=0)
    missing = [name for name, row in table.items() if not of_all(name, row, archs)]
    print(
        f"{len(table)} kernels for {len(archs)} architectures, at most {worst} bytes spilled ({MOST_SPILLED} allowed)"
    )
    return int(not entries or bool(missing) or worst > MOST_SPILLED)


if __name__ == "__main__":
    sys.exit(main())
