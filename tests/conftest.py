"""Hypothesis profiles: few fixed examples on every change, many random ones by night.

pytest --hypothesis-profile=night
"""

import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "change", derandomize=True, max_examples=20, deadline=None, suppress_health_check=_SLOW
)
settings.register_profile("night", max_examples=1000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("change")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-layouts", action="store_true",
        help="tests of ranks: every layout with every format, not a pairwise selection",
    )  # fmt: skip
    parser.addoption(
        "--thorough", action="store_true", help="slow tests too that differ little from others",
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.skip(reason="needs --thorough"))
