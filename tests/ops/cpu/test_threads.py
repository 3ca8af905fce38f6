"""How many threads compute, on machines of several kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minipaged.ops.cpu import threads


class Machine:
    """Files that say which logical CPUs share a core and what a container may use, and an affinity mask."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(threads, "SIBLINGS", str(folder / "siblings-{}"))
        monkeypatch.setattr(threads, "CPU_MAX", folder / "cpu.max")

    def affinity(self, *cpus: int) -> None:
        self._monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus), raising=False)

    def cores(self, *cores: tuple[int, ...]) -> None:
        for core in cores:
            for cpu in core:
                (self._folder / f"siblings-{cpu}").write_text(",".join(map(str, core)) + "\n")

    def quota(self, cpu_max: str) -> None:
        (self._folder / "cpu.max").write_text(cpu_max + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_two_threads_of_a_core_count_once(machine: Machine) -> None:
    machine.affinity(*range(8))
    machine.cores((0, 4), (1, 5), (2, 6), (3, 7))
    assert threads.default_num_threads() == 4


def test_only_cores_in_the_affinity_mask_count(machine: Machine) -> None:
    machine.cores((0, 4), (1, 5), (2, 6), (3, 7))
    machine.affinity(1, 5, 6)
    assert threads.default_num_threads() == 2


def test_cpus_of_unknown_cores_count_each(machine: Machine) -> None:
    machine.affinity(0, 1, 2)
    assert threads.default_num_threads() == 3


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000", 4),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 4),
        ("unheard of", 4),
    ],
)
def test_no_more_than_the_quota_of_a_container(machine: Machine, cpu_max: str, expected: int) -> None:
    machine.affinity(0, 1, 2, 3)
    machine.quota(cpu_max)
    assert threads.default_num_threads() == expected


def test_where_there_is_no_affinity_all_cpus_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert threads.default_num_threads() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert threads.default_num_threads() == 1


def test_here() -> None:
    assert 1 <= threads.default_num_threads() <= (os.cpu_count() or 1)
