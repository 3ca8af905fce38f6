from __future__ import annotations

import os

import pytest

from tests.ops.cuda.toolchain import missing


@pytest.fixture(scope="session", autouse=True)
def toolchain() -> None:
    """Skips every test here where CUDA code cannot be tested; in CI that is a failure."""
    reason = missing()
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
