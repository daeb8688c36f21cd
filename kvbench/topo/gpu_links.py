"""NVLink, xGMI and C2C: from inputs that name both ends, from the cells of a matrix, from the product."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from kvbench.core.graph import (
    Link,
    LinkKind,
    LinkRates,
    Node,
    Rate,
)
from kvbench.core.provenance import Origin, Provenance
from kvbench.topo.anchors import (
    GpuAnchor,
    c2c_rates,
    nvlink_rates,
    xgmi_rates,
)
from kvbench.topo.devices import short_name
from kvbench.topo.draft import Draft
from kvbench.topo.facts import Facts, MatrixFact, NvlinkFact

_MOST_DIRECT_NVLINKS = 18  # no GPU has more links than that without an NVSwitch


def add_gpu_links(draft: Draft, matrices: Sequence[MatrixFact]) -> None:
    """Adds the links of GPUs; cells of a matrix count only where no input names the ends."""
    for kind in ("nvlink", "c2c"):  # several inputs tell of the same links: the first that tells counts
        told = next((links for facts in draft.inputs if (links := _of_kind(facts, kind))), ())
        for fact in told:
            _explicit_link(draft, fact)
    explicit = any(_of_kind(facts, "nvlink") for facts in draft.inputs)
    for matrix in matrices[:1] if not explicit else ():
        _matrix_links(draft, matrix)
    for node_id, product in draft.products.items():
        if product.c2c is not None and not any(
            link.kind == "c2c" and link.a == node_id for link in draft.links.values()
        ):
            numa = next((node for node in draft.above(node_id) if node.kind == "numa"), None)
            if numa is not None:
                _across(draft, node_id, numa.id, "c2c", 1, product)


def _of_kind(facts: Facts, kind: str) -> tuple[NvlinkFact, ...]:
    return tuple(link for link in facts.nvlinks if link.kind == kind)


def _explicit_link(draft: Draft, fact: NvlinkFact) -> None:
    a = draft.node_of.get(fact.a) or _end(draft, fact.a)
    b = draft.node_of.get(fact.b) or _end(draft, fact.b)
    if fact.b == "near-numa" and a is not None:
        b = next((node.id for node in draft.above(a) if node.kind == "numa"), None)
    if a is None or b is None or a == b:
        draft.notes.append(f"{fact.kind} from {fact.a} to {fact.b}: an end is no device read; left out")
        return
    if draft.nodes[a].kind != "gpu" and draft.nodes[b].kind == "gpu":
        a, b = b, a
    product = draft.products.get(a)
    count = fact.count
    if count is None and fact.bytes_per_s is not None:
        per_link = nvlink_rates(_generation(product, fact.version), 1).theory
        count = max(1, round(fact.bytes_per_s / per_link.bytes_per_s)) if per_link else 1
    kind: LinkKind = "c2c" if fact.kind == "c2c" else "nvlink"
    _across(draft, a, b, kind, count or 1, product, rate=fact.bytes_per_s, version=fact.version)


def _generation(product: GpuAnchor | None, version: int | None) -> int | None:
    """The NVLink generation of the product, else the one that the input gave."""
    return product.nvlink if product is not None and product.nvlink is not None else version


def _end(draft: Draft, name: str) -> str | None:
    if name == "nvswitch":
        return _fabric(draft)
    kind, _, index = name.partition(":")
    if kind == "package":
        return f"socket{index}" if f"socket{index}" in draft.nodes else None
    if kind == "numa":
        return f"numa{index}" if f"numa{index}" in draft.nodes else None
    return None


def _fabric(draft: Draft) -> str:
    return draft.add(Node(id="nvswitch", kind="nvswitch", name="NVSwitch fabric", parent="machine", inferred=True))


def _across(
    draft: Draft,
    a: str,
    b: str,
    kind: LinkKind,
    count: int,
    product: GpuAnchor | None,
    *,
    rate: float | None = None,
    version: int | None = None,
) -> None:
    up, down = _across_sides(kind, count, product, version)
    if rate is not None and (up.theory is None or kind == "c2c"):
        told = Rate(bytes_per_s=rate, origin=Origin(provenance="measured", source="the link rate in the input"))
        up, down = replace(up, theory=told), replace(down, theory=told)
    node_id = f"{a}={b}" if kind != "c2c" else f"{a}=c2c={b}"
    if node_id in draft.links:  # NCCL prints one line per link group
        old = draft.links[node_id]
        del draft.links[node_id]
        _across(draft, a, b, kind, count + old.count, product, version=version)
        return
    draft.link(
        Link(
            id=node_id,
            kind=kind,
            a=a,
            b=b,
            label=f"{short_name(draft.nodes[a])} to {short_name(draft.nodes[b])}",
            forward=up,
            backward=down,
            count=count,
        )
    )


def _across_sides(
    kind: LinkKind, count: int, product: GpuAnchor | None, version: int | None
) -> tuple[LinkRates, LinkRates]:
    if kind == "c2c":
        if product is not None and product.c2c is not None:
            up, down = (c2c_rates(product.c2c, toward_cpu=cpu, provenance=product.provenance) for cpu in (True, False))
            return up, down
        gone = LinkRates(absent="not measured, and the GPU model is not in the input; see --gpu")
        return gone, gone
    told: Provenance = product.provenance if product is not None else "spec"
    if kind == "xgmi":
        rates = xgmi_rates(product.xgmi if product else None, provenance=told)
        return rates, rates
    if product is None or product.nvlink is None:
        told = "spec"  # the generation, if any, is the input's
    rates = nvlink_rates(_generation(product, version), count, provenance=told)
    return rates, rates


def _matrix_links(draft: Draft, matrix: MatrixFact) -> None:
    counts = {
        (a, b): int(cell[2:])
        for a, b in combinations(matrix.gpus, 2)
        if (cell := matrix.cell(a, b)) is not None and re.fullmatch(r"NV\d+", cell)
    }
    total = {gpu: sum(count for pair, count in counts.items() if gpu in pair) for gpu in matrix.gpus}
    switched = any(links > _MOST_DIRECT_NVLINKS for links in total.values())
    for gpu in matrix.gpus if switched else ():
        own = [count for pair, count in counts.items() if gpu in pair]
        if own and gpu in draft.node_of:
            node = draft.node_of[gpu]
            _across(draft, node, _fabric(draft), "nvlink", max(own), draft.products.get(node))
    for (a, b), count in counts.items() if not switched else ():
        if a in draft.node_of and b in draft.node_of:
            node = draft.node_of[a]
            _across(draft, node, draft.node_of[b], "nvlink", count, draft.products.get(node))
    for a, b in combinations(matrix.gpus, 2):
        if matrix.cell(a, b) == "XGMI" and a in draft.node_of and b in draft.node_of:
            node = draft.node_of[a]
            _across(draft, node, draft.node_of[b], "xgmi", 1, draft.products.get(node))
