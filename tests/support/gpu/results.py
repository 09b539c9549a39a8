"""The record on disk: gpu.json and report.txt, rewritten whenever more is known, kept from call to call."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.gpu.child import FAILED, LEFT_OUT, Record
from support.gpu.report import table


class OtherRecordError(Exception):
    """Raised if the folder holds a record of something else."""


class Results:
    """The steps' records, from this call and from earlier ones that wrote to the same folder.

    ``order`` has the names of all steps.
    """

    def __init__(self, out: Path, tested: dict[str, Any], order: Sequence[str]) -> None:
        self._out, self._tested, self._order = out, tested, order
        self._steps: dict[str, dict[str, Any]] = {}
        known = out / "gpu.json"
        if known.exists():
            before = json.loads(known.read_text())
            changed = [name for name in tested if before.get(name) != tested[name]]
            if changed:
                raise OtherRecordError(f"{changed[0]} {before.get(changed[0])}, now {tested[changed[0]]}")
            self._steps = {step["step"]: step for step in before["steps"]}

    def put(self, name: str, seconds: float, records: list[Record], *, ended: bool) -> None:
        """Replaces the step's earlier records, unless the new ones are empty: a step that was left out entirely."""
        if name in self._steps and all(found["status"] == LEFT_OUT for found in records):
            return
        now = datetime.datetime.now().isoformat(timespec="seconds")
        self._steps[name] = {"step": name, "at": now, "seconds": round(seconds, 1), "ended": ended, "checks": records}
        self.write()

    def write(self) -> None:
        """Writes both files completely: if killed, the old or the new ones remain."""
        for name, text in (("gpu.json", json.dumps(self.known, indent=1)), ("report.txt", table(self.known))):
            new = self._out / f"{name}.new"
            new.write_text(text + "\n")
            new.replace(self._out / name)

    @property
    def known(self) -> dict[str, Any]:
        steps = sorted(self._steps.values(), key=lambda step: self._order.index(step["step"]))
        return self._tested | {"steps": steps}

    def failed(self, names: Sequence[str]) -> bool:
        """Whether a check of one of these steps failed."""
        steps = [self._steps[name] for name in names if name in self._steps]
        return any(check["status"] == FAILED for step in steps for check in step["checks"])
