from unittest import mock

import pytest

from pyattn.cache import attention


@pytest.fixture
def attend(repeatable):
    """attention_with_cache by the backend's kernels."""
    with mock.patch.object(attention, "attention", repeatable.attention):
        yield attention.attention_with_cache
