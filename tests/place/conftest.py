"""Problems shared by the placement tests."""

import pytest

from rlfx.place import hardware, workloads
from rlfx.place.problem import build


@pytest.fixture(scope="session")
def chain():
    """ChainMM at full size on the paper's machine with slow links: 76 tasks, 4 devices."""
    work = workloads.chainmm()
    graph = work.graph()
    return build(graph, hardware.p100_pcie(bandwidth=2.5e9).fitted(graph, work.one_device_seconds))
