"""Paths and classes on random machines: sockets, NUMA nodes, host bridges, switches and devices below them."""

from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.graph import Graph, Link, LinkRates, Machine, Node, NodeKind
from kvbench.core.load_ceilings import load_ceilings, near_drams

NOTHING = LinkRates()
ORDER = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")


@st.composite
def machines(draw: st.DrawFn) -> Graph:
    nodes = [Node(id="machine", kind="machine", name="machine", parent=None)]
    links: list[Link] = []

    def add(name: str, kind: NodeKind, parent: str) -> str:
        nodes.append(Node(id=name, kind=kind, name=name, parent=parent))
        links.append(
            Link(id=f"{name}-{parent}", kind="pcie", a=name, b=parent, label=name, forward=NOTHING, backward=NOTHING)
        )
        return name

    def devices(parent: str, depth: int) -> None:
        for at in range(draw(st.integers(1, 2))):
            if depth < 3 and draw(st.booleans()):
                devices(add(f"{parent}s{at}", "switch", parent), depth + 1)
            else:
                add(f"{parent}d{at}", draw(st.sampled_from(["gpu", "nic", "disk"])), parent)

    sockets = [add(f"socket{at}", "socket", "machine") for at in range(draw(st.integers(1, 3)))]
    for at, socket in enumerate(sockets):
        numa = add(f"numa{at}", "numa", socket)
        add(f"dram{at}", "dram", numa)
        for bridge in range(draw(st.integers(1, 2))):
            devices(add(f"b{at}{bridge}", "host_bridge", numa), 0)
        links += [
            Link(id=f"{other}={socket}", kind="socket", a=other, b=socket, label="", forward=NOTHING, backward=NOTHING)
            for other in sockets[:at]
        ]
    return Graph(Machine(nodes=tuple(nodes), links=tuple(links)))


def leaves(graph: Graph) -> list[str]:
    return [node.id for node in graph.of_kind("gpu", "nic", "disk")]


@given(machines(), st.data())
def test_the_way_back_is_the_way_there_reversed(graph: Graph, data: st.DataObject) -> None:
    names = st.sampled_from([*leaves(graph), *(dram.id for dram in graph.of_kind("dram"))])
    a, b = data.draw(names), data.draw(names)
    there, back = graph.path(a, b), graph.path(b, a)
    assert [hop.link for hop in there] == [hop.link for hop in reversed(back)]
    assert all(one.direction != other.direction for one, other in zip(there, reversed(back), strict=True))
    assert graph.path_class(a, b) == graph.path_class(b, a)


@given(machines(), st.data())
def test_a_path_is_connected_and_crosses_a_socket_link_exactly_where_the_class_is_sys(
    graph: Graph, data: st.DataObject
) -> None:
    names = st.sampled_from(leaves(graph))
    a, b = data.draw(names), data.draw(names)
    at = a
    for hop in graph.path(a, b):
        link = graph.links[hop.link]
        start, end = (link.a, link.b) if hop.direction == "forward" else (link.b, link.a)
        assert start == at
        at = end
    assert at == b
    crossed = sum(graph.links[hop.link].kind == "socket" for hop in graph.path(a, b))
    assert crossed == (graph.path_class(a, b) == "SYS")


@given(machines(), st.data())
def test_classes_are_an_ultrametric(graph: Graph, data: st.DataObject) -> None:
    """No detour over a third device is nearer than the pair itself: what lets a tree be inferred from a matrix."""
    names = st.sampled_from(leaves(graph))
    a, b, c = data.draw(names), data.draw(names), data.draw(names)
    distance = [ORDER.index(graph.path_class(*pair)) for pair in ((a, b), (b, c), (a, c))]
    if "X" not in {graph.path_class(*pair) for pair in ((a, b), (b, c), (a, c))}:
        assert distance[2] <= max(distance[0], distance[1]) or {distance[0], distance[1]} == {1, 2}


@given(machines())
def test_every_device_has_one_near_dram_and_no_rate_means_no_ceiling(graph: Graph) -> None:
    for name in leaves(graph):
        assert len(near_drams(graph, name)) == 1
    for ceiling in load_ceilings(graph):
        assert ceiling.total_bytes_per_s is None
        assert ceiling.reason.startswith("no rate is known for")
