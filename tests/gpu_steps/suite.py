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


def name_of(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test failed, and where, or was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext[-LONGEST_MESSAGE:]
    return f"{crash.message[:LONGEST_MESSAGE]} ({Path(crash.path).name}:{crash.lineno})"


class Recorder:
    """Writes the names of the tests, leaves the first ``skip`` out, and writes a record of each that has ended.

    A file that can't be imported counts as a test that failed.
    """

    def __init__(self, results: TextIO, skip: int) -> None:
        self.results, self.skip = results, skip
        self.reports: list[pytest.TestReport] = []
        self.broken: list[pytest.CollectReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        write([name_of(x.nodeid) for x in (*self.broken, *items)], self.results)
        for report in self.broken[self.skip :]:
            write(record(name_of(report.nodeid), FAILED, 0, message_of(report)), self.results)
        del items[: max(0, self.skip - len(self.broken))]

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
        seconds = sum(report.duration for report in reports)
        write(record(name_of(nodeid), STATUS[worst.outcome], seconds, message_of(worst)), self.results)
        if worst.failed and lost():
            pytest.exit("the GPU is lost", LOST)


def run(results: TextIO, skip: int, *arguments: str) -> None:
    """Runs pytest with these arguments, without other packages' plugins; another torch's warnings are no errors."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options: list[Any] = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    options += ["-W", "default", "--continue-on-collection-errors"]
    status = pytest.main([*map(str, options), *arguments], plugins=[Recorder(results, skip)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(status)
