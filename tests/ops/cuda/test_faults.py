"""Faults planted into real kernels: each is found, by the check mode, by numbers, or by the launch."""

from __future__ import annotations

import pytest

from tests.ops.cuda.emulated import EmulatorFault, Execution, Order
from tests.ops.cuda.faults import attention, products, rows, sampling
from tests.ops.cuda.faults.fault import WRONG_NUMBERS, Fault
from tests.ops.cuda.faults.runs import RUNS

FAULTS = (*rows.FAULTS, *products.FAULTS, *attention.FAULTS, *sampling.FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.run}-{fault.what}".replace(" ", "-"))
def test_planted_fault(fault: Fault) -> None:
    run = RUNS[fault.run]
    source = run.source()
    assert fault.old in source, "the kernel has changed: plant the fault anew"
    found = ""
    try:
        run.launch(source.replace(fault.old, fault.new, 1), Execution(Order.SHUFFLED))
    except EmulatorFault as error:
        found = str(error)
    except AssertionError:
        found = WRONG_NUMBERS
    assert fault.found in found


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found_where_nothing_is_planted(name: str) -> None:
    run = RUNS[name]
    for order in Order:
        run.launch(run.source(), Execution(order))
