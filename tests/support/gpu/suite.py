"""``pytest --backend cuda`` as a step: each test is recorded like a check."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from support.gpu.child import (
    FAILED,
    LEFT_OUT,
    LONGEST_MESSAGE,
    LOST,
    PASSED,
    Share,
    finish,
    lost,
    poisoned,
    record,
    write,
)
from support.gpu.device import DEVICES

TESTS = Path(__file__).resolve().parents[2]
ON_GPU = ("gpu/test_on_gpu.py", "gpu/test_graphs.py", "gpu/test_cache.py", "gpu/test_pages.py")
STATUS = {"passed": PASSED, "failed": FAILED, "skipped": LEFT_OUT}


def name_of(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why and where a test failed, or why it was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext[-LONGEST_MESSAGE:]
    return f"{crash.message[:LONGEST_MESSAGE]} ({Path(crash.path).name}:{crash.lineno})"


class Recorder:
    """Writes the names of the share's tests, then a record of each when it ends; deselects those already done.

    A file that can't be imported counts as a failed test.
    """

    def __init__(self, results: TextIO, share: Share) -> None:
        self.results, self.share = results, share
        self.reports: list[pytest.TestReport] = []
        self.broken: list[pytest.CollectReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        broken = self.share.names(self.broken)
        items[:] = self.share.names(items)
        write([name_of(x.nodeid) for x in (*broken, *items)], self.results)
        for report in broken[self.share.skip :]:
            write(record(name_of(report.nodeid), FAILED, 0, message_of(report)), self.results)
        del items[: max(0, self.share.skip - len(broken))]

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
        result = record(name_of(nodeid), STATUS[worst.outcome], seconds, message_of(worst))
        is_lost = worst.failed and lost()
        write(poisoned(result) if is_lost else result, self.results)
        if is_lost:
            pytest.exit("the GPU is lost", LOST)


def run_tests(results: TextIO, share: Share, *arguments: str) -> None:
    """Runs pytest with these arguments, without other plugins; warnings of another torch are no errors."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options: list[Any] = ["-q", "-p", "no:cacheprovider", "-c", TESTS.parent / "pyproject.toml"]
    options += ["--rootdir", TESTS.parent, "-W", "default", "--continue-on-collection-errors"]
    status = pytest.main([*map(str, options), *arguments], plugins=[Recorder(results, share)])
    fine = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if status not in fine:
        sys.exit(status)


def run(results: TextIO, share: Share, name: str, group: str) -> None:
    """Runs "on_gpu", tests that only a GPU can run, or "laws", those that every backend passes."""
    device, alone = DEVICES[name], group == "on_gpu"
    files = [str(TESTS / file) for file in (ON_GPU if alone else device.laws)]
    others = [] if alone else [f"--ignore={TESTS / file}" for file in ON_GPU]
    run_tests(results, share, "--backend", device.backend, "-k", device.only, *others, *files)
