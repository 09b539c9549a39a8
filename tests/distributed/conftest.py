from pathlib import Path

import pytest
from support.ranks.pool import close


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """After this process's last test of this folder, the ranks end."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        close()
