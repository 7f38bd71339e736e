"""A process's picture of the nodes: who is alive by the clock by which records grow old."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from worlds import news

from cluster.node_book import NodeBook

EXPIRY = 2.0
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "remove", "look"]), st.sampled_from("abc"), st.integers(0, 5)), max_size=30
)


@given(STEPS)
def test_who_is_alive_after_a_drawn_history(steps: list[tuple[str, str, int]]) -> None:
    """Records come late, too: a worker that catches up hears of them at their age. Quarters of a second are exact."""
    book, now, heard = NodeBook(expiry=EXPIRY, max_nodes=3), 10.0, dict[str, float]()
    for seq, (step, name, quarters) in enumerate(steps):
        now += quarters / 4
        if step == "put":
            heard[name] = now - (quarters % 3) / 2
            book.put(news(id=name, seq=seq), heard[name])
        elif step == "remove" and name in heard:
            book.remove(name)
            del heard[name]
        table = book.current(now, now)
        alive = {name for name, at in heard.items() if now - at < EXPIRY}
        assert {table.ids[row] for row in table.rows() if table.live[row]} == alive
        assert {table.ids[row] for row in table.serving("b").rows} == alive
        assert {view.record.id for view in book.views(now, now)} == alive
