"""The console's JavaScript modules in a real browser, without its pages."""

from __future__ import annotations

import json
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_gateway import Running
from test_console_in_browser import page, served, start

from tests.support.browser import CHROMIUM, Browser

__all__ = ["page", "served"]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the path")


def test_a_call_that_ends_after_its_tenant_has_left_is_not_kept(page: Browser, served: Running) -> None:
    start(page, served)
    late = "const keep = it.callKeeper(); it.forgetCalls(); keep({ function: 'f' }); return it.callsOf('f').length;"
    assert page.run(f"import('{served.url}/console/calls.js').then((it) => {{ {late} }})") == 0


NAMES = st.from_regex(r"[ab0z]([-._ab09z]{0,2}[ab0z])?", fullmatch=True)


def test_search_by_the_beginning_of_a_name(page: Browser, served: Running) -> None:
    """`after` cuts exactly before the first name that matches, whatever the names are."""
    start(page, served)

    @given(names=st.sets(NAMES, max_size=30), prefix=st.from_regex(r"[ab0z][-._ab09z]{0,3}", fullmatch=True))
    def check(names: set[str], prefix: str) -> None:
        after = page.run(f"import('{served.url}/console/search.js').then((it) => it.before({json.dumps(prefix)}))")
        listed = [name for name in sorted(names) if name > after]
        matching = sorted(name for name in names if name.startswith(prefix))
        assert listed[: len(matching)] == matching

    check()


def test_quantiles_are_those_of_the_histogram(page: Browser, served: Running) -> None:
    """Against calls whose times are known: the quantile lies in the bucket of the true one."""
    start(page, served)
    edges = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5]

    @given(times=st.lists(st.floats(0.001, 0.499), min_size=1, max_size=40), share=st.sampled_from([0.5, 0.95]))
    def check(times: list[float], share: float) -> None:
        name = "garnish_ttft_seconds_bucket"
        lines = [f'{name}{{tenant="other",function="story",le="+Inf"}} 99.0']
        for edge, label in zip([*edges, float("inf")], [*map(str, edges), "+Inf"], strict=True):
            lines.append(f'{name}{{tenant="acme",function="story",le="{label}"}} {sum(t <= edge for t in times)}.0')
        text = "\n".join(lines)
        script = f"it.functionFigures({json.dumps(text)}, 'acme').get('story').p{round(share * 100)}"
        shown = page.run(f"import('{served.url}/console/metrics.js').then((it) => {script})")
        true = sorted(times)[ceil(share * len(times)) - 1]
        bucket = next(index for index, edge in enumerate(edges) if true <= edge)
        assert (edges[bucket - 1] if bucket else 0) <= shown <= edges[bucket]

    check()
