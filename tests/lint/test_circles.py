"""No modules of the product or the benchmarks import each other in a circle, imports for types included."""

from __future__ import annotations

from pathlib import Path

from tests.lint.circles import find_circles, import_graph


def test_there_is_no_circle() -> None:
    assert find_circles(import_graph()) == []


def test_imports_of_any_kind_make_a_circle(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("import kernels.b\n")
    (package / "b.py").write_text("if TYPE_CHECKING:\n    from kernels.c import C\n")
    (package / "c.py").write_text("def f():\n    from kernels import a\n")
    (package / "alone.py").write_text("from kernels import a, alone\n")
    assert find_circles(import_graph(tmp_path)) == [["kernels.a", "kernels.b", "kernels.c"]]
