"""Lists the import circles of the product; imports for type checking and inside functions count.

python -m tests.lint.circles         prints each circle: its modules, then the imports among them
python -m tests.lint.circles ROOT    the same for another checkout
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("adapters", "benchmarks", "cluster", "garnish", "gateway", "infra", "kernels", "node_agent")


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    kind: str
    """module, typing (under TYPE_CHECKING) or function"""


Graph = dict[str, list[Import]]


def import_graph(root: Path = ROOT) -> Graph:
    """Returns what each module of PACKAGES imports of them, by dotted name. A package is its `__init__`."""
    files = {_module_name(file.relative_to(root)): file for name in PACKAGES for file in root.glob(f"{name}/**/*.py")}
    graph = {}
    for module, file in files.items():
        imports = _imports(ast.parse(file.read_bytes()), files.keys(), "module")
        graph[module] = [each for each in imports if each.target != module]
    return graph


def find_circles(graph: Graph) -> list[list[str]]:
    """Returns the strongly connected components of two and more modules, each sorted, largest first."""
    forward = {module: [each.target for each in imports] for module, imports in graph.items()}
    backward: dict[str, list[str]] = {module: [] for module in graph}
    for module, targets in forward.items():
        for target in targets:
            backward[target].append(module)
    order: list[str] = []
    visited: set[str] = set()
    for start in graph:
        _visit(start, forward, visited, order)
    circles: list[list[str]] = []
    visited.clear()
    for start in reversed(order):
        component: list[str] = []
        _visit(start, backward, visited, component)
        if len(component) > 1:
            circles.append(sorted(component))
    return sorted(circles, key=lambda circle: (-len(circle), circle))


def _visit(start: str, edges: dict[str, list[str]], visited: set[str], order: list[str]) -> None:
    """Appends the unvisited modules that `start` reaches to `order`, each after those that it leads to."""
    if start in visited:
        return
    visited.add(start)
    path = [(start, iter(edges[start]))]
    while path:
        module, targets = path[-1]
        following = next((target for target in targets if target not in visited), None)
        if following is None:
            order.append(module)
            path.pop()
        else:
            visited.add(following)
            path.append((following, iter(edges[following])))


def _module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST, modules: Collection[str], kind: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        targets = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, "relative import"
        submodules = [f"{node.module}.{alias.name}" for alias in node.names]
        targets = [name if name in modules else node.module for name in submodules]
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                yield from _imports(child, modules, _kind_within(node, child, kind))
        return
    for target in dict.fromkeys(targets):
        if target in modules:
            yield Import(target, node.lineno, kind)


def _kind_within(parent: ast.AST, child: ast.AST, kind: str) -> str:
    if kind == "module" and isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
        return "function"
    if kind == "module" and isinstance(parent, ast.If) and child in parent.body:
        return "typing" if "TYPE_CHECKING" in ast.unparse(parent.test) else kind
    return kind


def main() -> int:
    graph = import_graph(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    circles = find_circles(graph)
    for circle in circles:
        print(f"{len(circle)} modules:")
        for module in circle:
            print(f"  {module}")
            for each in graph[module]:
                if each.target in circle:
                    print(f"    line {each.line} ({each.kind}): {each.target}")
    print(f"circles: {len(circles)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
