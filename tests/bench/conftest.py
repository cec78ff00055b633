"""Collects what the benchmarks measured and prints it as ratios within one run; asserts nothing."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from math import log2

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

WARMUPS = 5


@dataclass(frozen=True)
class Measured:
    """One benchmark: seconds of each round, sorted."""

    group: str
    name: str
    seconds: list[float]
    note: str
    size: int | None  # devices, where growth is what matters


Measure = Callable[..., None]
_MEASURED = pytest.StashKey[list[Measured]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MEASURED] = []


@pytest.fixture
def measure(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Measure:
    """Time work and keep it for the table. note: a text, or what gives one afterwards."""

    def run(
        group: str, name: str, work: Callable[[], object], rounds: int, *,
        note: str | Callable[[], str] = "", size: int | None = None, warmups: int = WARMUPS
    ) -> None:  # fmt: skip
        benchmark.group = group
        benchmark.pedantic(work, rounds=rounds, warmup_rounds=warmups)
        assert benchmark.stats is not None
        seconds = sorted(benchmark.stats.stats.data)
        text = note if isinstance(note, str) else note()
        request.config.stash[_MEASURED].append(Measured(group, name, seconds, text, size))

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A line for each: p50, p99, and how many times the first of its group."""
    groups: dict[str, list[Measured]] = {}
    for measured in config.stash[_MEASURED]:
        groups.setdefault(measured.group, []).append(measured)
    if not groups:
        return
    terminalreporter.section("ratios within this run")
    for group, members in groups.items():
        terminalreporter.write_line(group)
        first = _share(members[0])
        for it in members:
            p50, p99 = statistics.median(it.seconds), it.seconds[int(len(it.seconds) * 0.99) - 1]
            per = "/ (n log n) " if it.size is not None else ""
            terminalreporter.write_line(
                f"  {it.name:34} p50 {p50 * 1000:8.2f} ms  p99 {p99 * 1000:8.2f} ms  {per}x {_share(it) / first:5.2f}  {it.note}"
            )


def _share(measured: Measured) -> float:
    """What is compared within a group: the median, divided by n log n where growth is what matters."""
    p50 = statistics.median(measured.seconds)
    return p50 if measured.size is None else p50 / (measured.size * log2(measured.size))
