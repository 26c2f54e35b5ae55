"""A fresh store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.stores import VARIANTS, Store


@pytest.fixture(params=VARIANTS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = Store(request.param, tmp_path)
    yield made
    made.close()
