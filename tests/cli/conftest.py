"""Types a command in this process."""

import pytest

from typing_in import Type, typed


@pytest.fixture
def type_() -> Type:
    return typed
