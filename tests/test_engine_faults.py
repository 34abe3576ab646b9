"""Every deliberate fault of `faults.py` makes a test fail."""

from __future__ import annotations

import pytest
from faults import FAULTS, Fault, noticed


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault: Fault) -> None:
    assert noticed(fault)
