from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from backends import Backend

from pyattn import cached


@pytest.fixture
def attend(repeatable: Backend) -> Iterator[Callable[..., Any]]:
    """attention_with_cache by the backend's kernels."""
    with mock.patch.object(cached, "attention", repeatable.attention):
        yield cached.attention_with_cache
