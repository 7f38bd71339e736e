"""Comparison of two syntax trees without names, docstrings and comments, for tests.lint.same_tree."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
IMPORTS = (ast.Import, ast.ImportFrom)
IDENTIFIER_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Name: ("id",),
    ast.arg: ("arg",),
    ast.Attribute: ("attr",),
    ast.keyword: ("arg",),
    ast.FunctionDef: ("name",),
    ast.AsyncFunctionDef: ("name",),
    ast.ClassDef: ("name",),
    ast.ExceptHandler: ("name",),
    ast.MatchAs: ("name",),
    ast.MatchStar: ("name",),
    ast.MatchMapping: ("rest",),
    ast.Global: ("names",),
    ast.Nonlocal: ("names",),
    ast.MatchClass: ("kwd_attrs",),
}
# Names that stand for a binding of the scope, not for an attribute of some object.
SCOPED = (ast.Name, ast.arg, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping, *FUNCTIONS, ast.ClassDef)
# Fields in the order in which they are evaluated, where that is not the order in the text.
EVALUATION_ORDER: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Assign: ("value", "targets", "type_comment"),
    ast.AnnAssign: ("value", "annotation", "target", "simple"),
    ast.NamedExpr: ("value", "target"),
    ast.For: ("iter", "target", "body", "orelse", "type_comment"),
    ast.AsyncFor: ("iter", "target", "body", "orelse", "type_comment"),
}
ATTRIBUTE_CALLS = {"getattr", "setattr", "delattr", "hasattr", "attrgetter", "patch", "object", "cast", "import_module"}


class Differ(Exception):
    """Two trees differ. The message says where, and how."""


class Scope:
    """Pairs of names of a function, class, comprehension or module, in order of evaluation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uses: list[tuple[str, str, bool, int]] = []
        """old name, new name, whether it is bound here, line"""

    def merged(self) -> Iterator[str]:
        """Yields a line for two old names that became one while both were in use."""
        olds: dict[str, dict[str, list[tuple[int, bool]]]] = defaultdict(dict)
        for index, (old, new, bound, _) in enumerate(self.uses):
            olds[new].setdefault(old, []).append((index, bound))
        for new, by_old in olds.items():
            spans = sorted((uses[0][0], uses[-1][0], uses[0][1], old) for old, uses in by_old.items())
            for (_, end, _, first), (start, _, bound, second) in pairwise(spans):
                if start < end or not bound:
                    line = self.uses[start][3]
                    yield f"line {line}: {first} and {second} are both {new} now, in {self.name}"


class Comparison:
    """Parallel walk through two trees; raises Differ at the first node that differs."""

    def __init__(self, in_tests: bool) -> None:
        self.in_tests = in_tests
        self.scopes: list[Scope] = []
        self.names: dict[tuple[str, str], int] = {}
        """pairs that differ, with the line of the first"""
        self.strings: list[tuple[str, str, int, bool]] = []
        """pairs that differ, line, whether it is an attribute name or an annotation"""
        self.modules: dict[tuple[str, str], int] = {}

    def compare_modules(self, old: ast.Module, new: ast.Module) -> None:
        scope = self._new_scope("the module")
        self._compare_bodies(old.body, new.body, scope, new)

    def _new_scope(self, name: str) -> Scope:
        self.scopes.append(Scope(name))
        return self.scopes[-1]

    def _compare(self, old: object, new: object, scope: Scope, parent: ast.AST, attribute: bool = False) -> None:
        if isinstance(old, list) and isinstance(new, list):
            if old and new and isinstance(old[0], ast.stmt) and isinstance(new[0], ast.stmt):
                self._compare_bodies(old, new, scope, parent)
                return
            if len(old) != len(new):
                raise Differ(_describe(parent, f"{len(old)} parts, now {len(new)}"))
            for one, another in zip(old, new, strict=True):
                self._compare(one, another, scope, parent, attribute)
        elif isinstance(old, ast.AST) and isinstance(new, ast.AST):
            if type(old) is not type(new):
                raise Differ(_describe(new if hasattr(new, "lineno") else parent, f"{_text(old)}, now {_text(new)}"))
            self._compare_nodes(old, new, scope, attribute)
        elif isinstance(old, str) and isinstance(new, str) and old != new:
            self.strings.append((old, new, _line(parent), attribute))
        elif type(old) is not type(new) or old != new:
            raise Differ(_describe(parent, f"{_text(old)}, now {_text(new)}"))

    def _compare_nodes(self, old: ast.AST, new: ast.AST, scope: Scope, attribute: bool) -> None:
        identifiers = IDENTIFIER_FIELDS.get(type(new), ())
        order = EVALUATION_ORDER.get(type(new), new._fields)
        inner = scope
        if isinstance(new, (*FUNCTIONS, ast.ClassDef, ast.Lambda, *COMPREHENSIONS)):
            inner = self._new_scope(getattr(new, "name", type(new).__name__))
        if isinstance(new, ast.Lambda) and isinstance(old, ast.Lambda):
            self._compare_arguments(old.args, new.args, scope, inner, new)
            self._compare(old.body, new.body, inner, new)
            return
        if isinstance(new, COMPREHENSIONS):
            order = ("generators", *(name for name in new._fields if name != "generators"))
        if isinstance(new, ast.comprehension):
            order = ("iter", "target", "ifs", "is_async")
        if isinstance(new, ast.Call):
            attribute = called_name(new.func) in ATTRIBUTE_CALLS
        for name in order:
            one, another = getattr(old, name, None), getattr(new, name, None)
            if name in identifiers:
                self._pair(one, another, new, scope)
            elif name == "args" and isinstance(one, ast.arguments) and isinstance(another, ast.arguments):
                self._compare_arguments(one, another, scope, inner, new)
            elif name in ("annotation", "returns"):
                self._compare(one, another, scope, new, attribute=True)
            elif name in ("decorator_list", "bases", "keywords"):
                self._compare(one, another, scope, new, attribute and name == "keywords")
            elif name not in ("ctx", "kind", "type_comment"):
                self._compare(one, another, inner, new, attribute)

    def _compare_arguments(
        self, old: ast.arguments, new: ast.arguments, outer: Scope, inner: Scope, owner: ast.AST
    ) -> None:
        self._compare(old.defaults, new.defaults, outer, owner)
        self._compare(old.kw_defaults, new.kw_defaults, outer, owner)
        for kind in ("posonlyargs", "args", "vararg", "kwonlyargs", "kwarg"):
            one, another = getattr(old, kind), getattr(new, kind)
            olds, news = (value if isinstance(value, list) else [value] for value in (one, another))
            if len(olds) != len(news) or [bool(arg) for arg in olds] != [bool(arg) for arg in news]:
                raise Differ(_describe(owner, "other parameters"))
            for old_arg, new_arg in zip(olds, news, strict=True):
                if new_arg is not None:
                    self._pair(old_arg.arg, new_arg.arg, new_arg, inner)
                    self._compare(old_arg.annotation, new_arg.annotation, outer, new_arg, attribute=True)

    def _pair(self, old: object, new: object, node: ast.AST, scope: Scope) -> None:
        """Records that one identifier, or list of identifiers, became another."""
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for one, another in zip(old, new, strict=True):
                self._pair(one, another, node, scope)
        elif isinstance(old, str) and isinstance(new, str):
            if isinstance(node, SCOPED):
                bound = not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store)
                scope.uses.append((old, new, bound, _line(node)))
            if old != new:
                self.names.setdefault((old, new), _line(node))
        elif old != new:
            raise Differ(_describe(node, f"{old}, now {new}"))

    def _compare_bodies(self, old: Sequence[ast.stmt], new: Sequence[ast.stmt], scope: Scope, parent: ast.AST) -> None:
        olds, news = list(statements(old)), list(statements(new))
        for one, another in zip(olds, news, strict=False):
            if isinstance(one, list) and isinstance(another, list):
                self._compare_imports(one, another)
            elif isinstance(one, list) or isinstance(another, list):
                node = another[0] if isinstance(another, list) else another
                raise Differ(_describe(node, "a statement, and an import"))
            else:
                self._compare(one, another, scope, parent)
        if len(olds) != len(news):
            rest = (news if len(news) > len(olds) else olds)[min(len(olds), len(news))]
            node = rest[0] if isinstance(rest, list) else rest
            which = "added" if len(news) > len(olds) else "removed"
            raise Differ(_describe(node, f"{which}: {_text(node)}"))

    def _compare_imports(self, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> None:
        """Compares two runs of import statements without their order, which depends on the names."""
        olds, news = Counter(_imported(old)), Counter(_imported(new))
        line = new[0].lineno
        removed, added = sorted((olds - news).elements(), key=str), sorted((news - olds).elements(), key=str)
        for same in ((1, 2), (0, 2), (0, 1), (1,), (0,), ()):
            for entry in list(removed):
                match = next((other for other in added if all(entry[i] == other[i] for i in same)), None)
                if match is not None:
                    removed.remove(entry)
                    added.remove(match)
                    if entry[0] != match[0]:
                        self.modules.setdefault((entry[0], match[0]), line)
                    for one, another in zip(entry[1:], match[1:], strict=True):
                        if one != another:
                            self.names.setdefault((one, another), line)
        for entry in removed:
            raise Differ(f"line {line}: import removed: {' '.join(entry)}")
        for entry in added:
            raise Differ(f"line {line}: import added: {' '.join(entry)}")


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt | list[ast.stmt]]:
    """Yields the statements without docstrings, notes and `pass`; a run of imports is one list."""
    run: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, IMPORTS):
            run.append(statement)
            continue
        if isinstance(statement, ast.Pass) or (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            continue
        if run:
            yield run
            run = []
        yield statement
    if run:
        yield run


def _imported(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, str, str]]:
    """Yields module, name and name here of each import."""
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield "." * statement.level + (statement.module or ""), alias.name, alias.asname or alias.name
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name, "", alias.asname or alias.name


def called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _text(value: object) -> str:
    if isinstance(value, ast.AST):
        try:
            value = ast.unparse(value)
        except (AttributeError, ValueError):
            return type(value).__name__
    return str(value).split("\n", maxsplit=1)[0][:80]


def _describe(node: ast.AST, what: str) -> str:
    return f"line {_line(node)}: {type(node).__name__}: {what}"
