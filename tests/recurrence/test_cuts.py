"""Minimum cuts of the smaller graph against those of the whole one, by another algorithm."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfx.recurrence.analysis.cuts import Network

NODES = st.sampled_from(["source", "sink", *range(9)])
CAPACITIES = st.sampled_from([None, None, 0, 1, 1, 2, 3, 5, 10**15])
ARCS = st.dictionaries(
    st.tuples(NODES, NODES).filter(lambda arc: arc[0] != arc[1]), CAPACITIES, min_size=4, max_size=40
)


@given(ARCS)
def test_a_cut_is_the_cheapest_and_has_the_fewest_nodes_on_the_sinks_side(arcs):
    network, graph = Network(), nx.DiGraph()
    for (u, v), capacity in {("source", "sink"): 0, **arcs}.items():
        network.add(u, v, capacity)
        graph.add_edge(u, v, **({} if capacity is None else {"capacity": capacity}))
    try:
        _, (first, last) = nx.minimum_cut(graph, "source", "sink")
    except nx.NetworkXUnbounded:
        with pytest.raises(ValueError, match="without a capacity"):
            network.sides("source", "sink")
        return
    assert network.sides("source", "sink") == (first, last)


def test_an_arc_that_is_added_again_replaces_the_first():
    network = Network()
    network.add("source", "a", 1)
    network.add("a", "sink", 2)
    network.add("source", "a", 3)
    assert network.sides("source", "sink") == ({"source", "a"}, {"sink"})
    assert "a" in network
    assert "b" not in network


def test_many_arcs_on_a_way_are_no_recursion():
    network, length = Network(), 5000
    for i in range(length):
        network.add(i, i + 1, 2 if i != 3000 else 1)
    assert network.sides(0, length) == (set(range(3001)), set(range(3001, length + 1)))
