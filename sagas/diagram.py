"""A saga as a Mermaid flowchart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sagas.graph import NodeKind

if TYPE_CHECKING:
    from holdfast.sagas.graph import Graph, Node

_SHAPES = {
    NodeKind.LOCAL: ("[", "]"),
    NodeKind.COMMAND: ("[/", "/]"),
    NodeKind.SIGNAL: (">", "]"),
    NodeKind.TIMER: ("([", "])"),
    NodeKind.CHOICE: ("{", "}"),
}


def mermaid(graph: Graph) -> str:
    """Return *graph* as Mermaid: steps and their order, cases, compensations and the pivot."""
    ids = {name: f"s{number}" for number, name in enumerate(graph.nodes)}
    lines = ["flowchart TD", f"    start(({mermaid_text(graph.saga)} v{graph.version}))"]
    for node in graph:
        begin, end = _SHAPES[node.kind]
        lines.append(f'    {ids[node.name]}{begin}"{_label(node)}"{end}')
        if node.undo is not None:
            lines.append(f'    u{ids[node.name]}["{mermaid_text(node.undo.name)}"]:::undo')
            lines.append(f"    {ids[node.name]} -. undo .-> u{ids[node.name]}")
    lines.append("    done((done))")
    last = set(graph.nodes)
    for node in graph:
        direct = _direct(graph, node)
        last -= direct
        lines += [
            f"    {ids[one]} -->{_case(node, one)} {ids[node.name]}" for one in sorted(direct)
        ]
        if not direct:
            lines.append(f"    start --> {ids[node.name]}")
    lines += [f"    {ids[name]} --> done" for name in graph.nodes if name in last]
    if graph.pivot is not None:
        lines.append(f"    class {ids[graph.pivot]} pivot")
    lines += ["    classDef undo stroke-dasharray: 4", "    classDef pivot stroke-width: 4px"]
    return "\n".join(lines) + "\n"


def _direct(graph: Graph, node: Node) -> set[str]:
    """Return what *node* waits for without what that waits for itself."""
    covered = {far for near in node.after for far in graph.ancestors[near]}
    return set(node.after - covered)


def _case(node: Node, earlier: str) -> str:
    cases = [case for choice, case in node.when if choice == earlier]
    return f'|"{mermaid_text(cases[0])}"|' if cases else ""


def _label(node: Node) -> str:
    where = f"<br/>{mermaid_text(node.topic)}" if node.topic else ""
    return f"{mermaid_text(node.name)}{where}"


def mermaid_text(name: str) -> str:
    """Return *name* so that Mermaid takes it as nothing but text."""
    return "".join(char if char.isalnum() or char in " _-." else f"#{ord(char)};" for char in name)
