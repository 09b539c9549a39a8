"""``pytest --backend cuda`` as a step: each test is recorded as a check is."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from gpu_steps.child import FAILED, LEFT_OUT, LONGEST_MESSAGE, LOST, PASSED, finish, lost, record, write

ROOT = Path(__file__).resolve().parents[2]
STATUS = {"passed": PASSED, "failed": FAILED, "skipped": LEFT_OUT}


def message_of(report: pytest.TestReport) -> str:
    """Why a test failed, and where, or was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext
    return f"{crash.message} ({Path(crash.path).name}:{crash.lineno})"


class Recorder:
    """Writes the names of the tests, leaves the first ``skip`` out, and writes a record of each that has ended."""

    def __init__(self, results: TextIO, skip: int) -> None:
        self.results, self.skip = results, skip
        self.reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        write([item.nodeid.removeprefix("tests/") for item in items], self.results)
        del items[: self.skip]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        result = yield
        finish()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        reports, self.reports = self.reports, []
        worst = next((report for report in reports if not report.passed), reports[-1])
        seconds, message = sum(report.duration for report in reports), message_of(worst)[:LONGEST_MESSAGE]
        write(record(nodeid.removeprefix("tests/"), STATUS[worst.outcome], seconds, message), self.results)
        if worst.failed and lost():
            pytest.exit("the GPU is lost", LOST)


def run(results: TextIO, skip: int, *arguments: str) -> None:
    """Runs pytest with these arguments; of other packages' plugins, whose warnings would be errors here, none."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options: list[Any] = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    status = pytest.main([*map(str, options), *arguments], plugins=[Recorder(results, skip)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(status)
