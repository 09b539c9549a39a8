from unittest import mock

import pytest

from pyattn import cached


@pytest.fixture
def attend(repeatable):
    """attention_with_cache by the backend's kernels."""
    with mock.patch.object(cached, "attention", repeatable.attention):
        yield cached.attention_with_cache
