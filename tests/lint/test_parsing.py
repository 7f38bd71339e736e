"""A source is parsed though another one is parsed in the middle."""

import ast
import gc

from tests.support.parsing import parse_again


class ParsesWhenCollected:
    """Garbage, of a cycle, that parses when it is collected, as a logged traceback does."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        parse_again("1 + 1")


def test_a_conversion_disturbed_by_another_gives_the_tree() -> None:
    source = "x = " + "(" * 40 + "1" + " + 1)" * 40
    for _ in range(200):
        ParsesWhenCollected()
        threshold, enabled = gc.get_threshold(), gc.isenabled()
        gc.enable()
        gc.set_threshold(20)
        try:
            tree = ast.parse(source)
        finally:
            gc.set_threshold(*threshold)
            if not enabled:
                gc.disable()
        assert len(list(ast.walk(tree))) == 40 * 3 + 5
