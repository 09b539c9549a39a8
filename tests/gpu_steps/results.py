"""The record on disk: gpu.json and report.txt, written anew whenever more is known, kept from call to call."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_steps.child import FAILED, LEFT_OUT, Record
from gpu_steps.report import table


class OtherRecordError(Exception):
    """The folder holds a record of something else."""


class Results:
    """The steps' records, of this call and of those before that wrote to the same folder.

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
        """Puts this in the place of what was known of the step, unless it is nothing: a step left out wholly."""
        if name in self._steps and all(found["status"] == LEFT_OUT for found in records):
            return
        now = datetime.datetime.now().isoformat(timespec="seconds")
        self._steps[name] = {"step": name, "at": now, "seconds": round(seconds, 1), "ended": ended, "checks": records}
        self.write()

    def write(self) -> None:
        """Both files, whole: whoever is killed leaves the old ones or the new ones."""
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
