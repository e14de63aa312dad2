"""Hypothesis profiles: few fixed examples on every change, many random ones by night.

pytest --hypothesis-profile=night
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import kept_figures
import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "change", derandomize=True, max_examples=20, deadline=None, suppress_health_check=_SLOW
)
settings.register_profile("night", max_examples=1000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("change")

_COMPILED = pytest.StashKey[set[Path]]()  # figures that were there before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-layouts", action="store_true",
        help="tests of ranks: every layout with every format, not a pairwise selection",
    )  # fmt: skip
    parser.addoption(
        "--thorough", action="store_true",
        help="slow tests too that differ little from others; kept figures of kernels are not read",
    )  # fmt: skip
    parser.addoption(
        "--keep-figures", action="store_true", help="compile every kernel and keep its figures",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Before other processes start: where they find figures of compiled kernels."""
    if hasattr(config, "workerinput"):
        return  # one of those processes
    if config.getoption("--keep-figures") or config.getoption("--thorough"):
        folder = TemporaryDirectory(prefix="metainfer-cache-")
        config.add_cleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name
    else:
        kept_figures.unpack(kept_figures.file(), kept_figures.cache())
    config.stash[_COMPILED] = set(kept_figures.cache().glob("*.json"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """How many kernels were compiled; with --keep-figures their figures are written down."""
    count = len(set(kept_figures.cache().glob("*.json")) - config.stash[_COMPILED])
    if config.getoption("--keep-figures"):
        if exitstatus or _is_selection(config):
            terminalreporter.write_line("figures are kept of whole runs that passed: none written")
            return
        kept_figures.pack(kept_figures.cache(), kept_figures.file())
        terminalreporter.write_line(f"{count} figures: {kept_figures.file()}")
    elif count and not config.getoption("--thorough"):
        terminalreporter.write_line(
            f"{count} kernels were compiled: `make tests-figures` keeps their figures"
        )


def _is_selection(config: pytest.Config) -> bool:
    """Whether only some of the tests were asked for."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    return named or bool(config.option.keyword or config.option.markexpr)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.skip(reason="needs --thorough"))
