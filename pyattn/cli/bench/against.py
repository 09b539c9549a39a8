"""``pyattn bench --against FOLDER``: this build beside another one, in pairs.

Two builds can't be loaded in one process, so each has one, and they take turns: in every round each build times the
same call as often, in random order, while the other sleeps, on the same processor and with memory that it keeps. A
speed-up is the other build's time over this one's within a round. Both run this command line, with the same inputs, so
results of the same bits are recognised.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn import cli
from pyattn.cli.bench import turns
from pyattn.cli.bench.processes import without_interrupts
from pyattn.cli.bench.sides.calls import Calls, Run
from pyattn.cli.bench.table import REASON, Row
from pyattn.cli.checks import InputError
from pyattn.cli.timing import MOST_ROUNDS, SHORTEST

SLOWER = 1.05
"""With the same library twice, 31 of 32 medians were within 4 %, and no call was longer in three rounds of four."""

PLACES = 3
"""How often the tensors of a comparison are made anew: where in memory they lie moves a time by several per cent."""

MEMORY = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
"""With these settings both processes keep their memory: page faults in one of the two took up to 15 % of a call."""

RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs a file without its folder among the places to import from."""


class Plan(NamedTuple):
    """A comparison: what makes its calls, and for which sizes."""

    make: Callable[[Run, Any], Calls]
    run: Run
    sizes: Any


def _end(process: subprocess.Popen[bytes], pipe: Any) -> None:
    pipe.close()
    process.kill()
    process.wait()


class Build:
    """A process with a build of pyattn; it ends with this object.

    Attributes:
        facts: version, instruction set, torch and compiler.

    Raises:
        InputError: no build of pyattn for this torch is installed in ``folder``; None is this installation.
    """

    facts: dict[str, str]

    def __init__(self, folder: Path | None) -> None:
        paths = [str(Path(path).resolve()) for path in sys.path]
        home = None if folder is None else str(folder.resolve())
        options = {"paths": [home, *paths] if home else paths, "folder": home, "cli": str(Path(cli.__file__).parent)}
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-c", RUN, str(Path(__file__).with_name("build.py")), str(theirs.fileno())]
        with without_interrupts():
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [*command, json.dumps(options)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"GLIBC_TUNABLES": MEMORY},
            )
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(self, _end, self._process, self._pipe)
        theirs.close()
        try:
            facts = self._pipe.recv()
        except EOFError:
            facts = f"a process that ended with code {self._process.wait()}"
        if not isinstance(facts, dict):
            self.close()
            raise InputError("--against must be a folder with an installed pyattn for this torch", f"{folder}: {facts}")
        self.facts = facts

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a module's function in that process.

        Raises:
            RuntimeError: its error.
            InputError: the process has ended.
        """
        try:
            self._pipe.send((function, *arguments))
            result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise InputError("--against needs both builds until the end", f"code {self._process.wait()}") from error
        if isinstance(result, RuntimeError):
            raise result
        return result

    def close(self) -> None:
        """Ends the process."""
        self._finalizer()


def _cpus(threads: int) -> Sequence[int | None]:
    """The processors that rounds take in turn, both builds the same one; None lets the system choose.

    Left alone, each process keeps its processor, and the same library took 1.35 times as long on the busier one.
    """
    if threads > 1 or not hasattr(os, "sched_getaffinity"):
        return [None]
    return sorted(os.sched_getaffinity(0))


Rounds = tuple[list[float], list[float]]
"""Times per call of this build and of the other one, a pair for each round."""


def _add_rounds(pair: Sequence[Build], side: turns.Side, seconds: float, threads: int, rounds: Rounds) -> None:
    """Adds rounds for about ``seconds``, and at least one."""
    first = min(build.run(turns.timed, side, 1) for build in pair)
    repeats = max(1, int(SHORTEST / max(first, 1e-7)))
    cpus, n, started = _cpus(threads), 0, time.perf_counter()
    while n < 1 or (n < MOST_ROUNDS / PLACES and (time.perf_counter() - started) * (n + 1) / n < seconds):
        done = len(rounds[0])
        order = random.Random(done).sample(list(zip(rounds, pair, strict=True)), 2)
        for taken, build in order:
            taken.append(build.run(turns.timed, side, repeats, cpus[done % len(cpus)]))
        n += 1


def _row(what: str, side: turns.Side, taken: Rounds, ours: str, theirs: str) -> Row:
    """``ours`` and ``theirs`` are the digests of both results."""
    same_bits = ours == theirs if ours or theirs else None
    low, median, high = statistics.quantiles([b / a for a, b in zip(*taken, strict=True)], n=4, method="inclusive")
    seconds, others = map(statistics.median, taken)
    times = {"seconds": seconds, "other_seconds": others, "speedup": median, "low": low, "high": high}
    return {"what": what, "side": side[0], "pass": side[1], **times, "same_bits": same_bits, "rounds": taken}


def compared(pair: Sequence[Build], what: str, plan: Plan, seconds: float, threads: int) -> list[Row]:
    """A row for each call of this comparison; a forward takes about ``seconds`` a build, a training twice that."""
    try:
        results = [build.run(turns.made, plan.make, plan.run, plan.sizes, threads) for build in pair]
    except RuntimeError as error:  # an older library lacks what this command line calls
        return [{"what": what, "side": "pyattn", "pass": "all", "left_out": str(error)}]
    rows: list[Row] = []
    rounds: dict[turns.Side, Rounds] = {}
    for side in dict.fromkeys([*results[0], *results[1]]):
        reasons = [result.get(side, ("", "not in this build"))[1] for result in results]
        if any(reasons):
            reason = "; ".join(f"{name}: {why}" for name, why in zip(("this", "other"), reasons, strict=True) if why)
            rows.append({"what": what, "side": side[0], "pass": side[1], "left_out": reason})
        else:
            rounds[side] = [], []
    for place in range(PLACES):
        if place:
            for build in pair:
                build.run(turns.made, plan.make, plan.run, plan.sizes, threads)
        for side, taken in rounds.items():
            share = 2 * seconds * (1 if side[1] == "forward" else 2) / PLACES
            _add_rounds(pair, side, share, threads, taken)
    return [_row(what, side, taken, *(result[side][0] for result in results)) for side, taken in rounds.items()] + rows


def line(row: Row) -> str:
    """A row without its comparison's name."""
    name = f"{row['side']}, {row['pass'].replace('_', '+')}"
    if "left_out" in row:
        return f"  {name:52}  left out: {row['left_out'][:REASON]}"
    scale = 1e6 if row["seconds"] < 1e-3 else 1e3
    times = "".join(f"{scale * row[key]:10.3f}" for key in ("seconds", "other_seconds"))
    bits = {True: "same", False: "other", None: ""}[row["same_bits"]]
    quartiles = f"{row['low']:.2f} to {row['high']:.2f}"
    return f"  {name:52}{times}{'us' if scale > 1e3 else 'ms':>4}{row['speedup']:9.2f}x{quartiles:>15}  {bits}".rstrip()


def show(rows: Sequence[Row]) -> None:
    """Print one comparison."""
    head = f"{'this':>10}{'other':>10}{'':4}{'speed-up':>10}{'quartiles':>15}  bits"
    tqdm.write(f"\n{rows[0]['what']}\n{'':54}{head}")
    for row in rows:
        tqdm.write(line(row))


def show_slower(rows: Sequence[Row]) -> None:
    """Print the rows in which this build takes SLOWER times as long or more, and longer in three rounds of four."""
    slow = [row for row in rows if "speedup" in row and row["speedup"] * SLOWER <= 1 and row["high"] < 1]
    print(f"\n{len(slow)} of {len(rows)} calls are slower by {SLOWER - 1:.0%} or more{':' if slow else ''}")
    for row in sorted(slow, key=lambda row: float(row["speedup"])):
        print(f"{row['what']}\n{line(row)}")


def measured(folder: Path, plans: dict[str, Plan], seconds: float, ends: float, threads: int) -> list[Row]:
    """The rows of all comparisons, each shown when it is done.

    ``seconds`` as in :func:`compared`; after ``ends`` by ``time.perf_counter()``, each call gets PLACES rounds.
    """
    pair: list[Build] = []
    rows: list[Row] = []
    try:
        pair += (Build(None), Build(folder))
        for name, build in zip(("this build", folder), pair, strict=True):
            print(f"{name}: " + ", ".join(f"{fact} {value}" for fact, value in build.facts.items()))
        for i, (what, plan) in enumerate(tqdm(plans.items(), unit="comparison", leave=False, disable=None)):
            left = max(0.0, ends - time.perf_counter()) / (len(plans) - i)
            new = compared(pair, what, plan, min(seconds, left / 6), threads)
            show(new)
            rows += new
        show_slower(rows)
        return rows
    finally:
        for build in pair:
            build.close()
