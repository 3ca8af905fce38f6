"""How many threads compute on the CPU."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def default_num_threads() -> int:
    """Physical cores that this process may use: two threads of one core share its arithmetic units.

    Counts the cores in the process's affinity mask, and no more than a container's CPU quota where there is one.
    """
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return max(1, (os.cpu_count() or 1))
    cores = len({_siblings(cpu) for cpu in usable})
    return max(1, cores if math.isinf(_quota()) else min(cores, math.ceil(_quota())))


def _siblings(cpu: int) -> str:
    """Names the core that a logical CPU belongs to."""
    try:
        return Path(SIBLINGS.format(cpu)).read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> float:
    """CPUs that the control group may use at a time."""
    try:
        quota, period = CPU_MAX.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # no control group, or "max"
        return math.inf
