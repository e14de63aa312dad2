"""Options of the pass tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the expected half of every case"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    # Absent when this folder is collected from above, where options were read already.
    return bool(request.config.getoption("--update-golden", default=False))
