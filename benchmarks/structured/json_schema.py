"""Coverage of JSON Schema's own test suite: the schemas that are served, and whether the right answers are allowed.

    python -m benchmarks.structured.json_schema --suite CHECKOUT --json benchmarks/results/json_schema.json

CHECKOUT is of github.com/json-schema-org/JSON-Schema-Test-Suite. Each schema of draft 2020-12 is either refused, as a
call with it would be, or each of its instances is written as JSON and read by the grammar. `agree`: schemas whose
grammar takes and refuses what the suite says. `stricter`: it refuses a valid instance (for instance because
properties come in another order than the schema has them), which makes answers narrower and never wrong. `looser`: it
takes an invalid instance, so that an answer may violate the schema. A file is a keyword.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from benchmarks.common.report import arguments, publish, report
from cluster.grammars import compiled_form, limits, problem_of
from cluster.messages import Grammar

DRAFT = Path("tests", "draft2020-12")


def judge(schema: Any, tests: list[dict[str, Any]], tokenizer: LLTokenizer) -> str:
    """Returns refused, agree, stricter or looser. A schema that is both stricter and looser counts as looser."""
    grammar = Grammar("json", json.dumps(schema))
    if problem_of(grammar):
        return "refused"
    verdicts = {(test["valid"], accepts(grammar, test["data"], tokenizer)) for test in tests}
    if (False, True) in verdicts:
        return "looser"
    return "stricter" if (True, False) in verdicts else "agree"


def accepts(grammar: Grammar, instance: Any, tokenizer: LLTokenizer) -> bool:
    """Returns whether the grammar takes the instance, byte by byte, as a whole answer."""
    matcher = LLMatcher(tokenizer, compiled_form(grammar), log_level=0, limits=limits())
    tokens = tokenizer.tokenize_bytes(json.dumps(instance, ensure_ascii=False).encode())
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--suite", type=Path, required=True, help="checkout of JSON-Schema-Test-Suite")
    options = parser.parse_args()
    tokenizer, rows = LLTokenizer("byte"), []
    for file in sorted((options.suite / DRAFT).glob("*.json")):
        groups = json.loads(file.read_text())
        counts = Counter(judge(group["schema"], group["tests"], tokenizer) for group in groups)
        rows.append({"keyword": file.stem, "schemas": len(groups), **counts})
    names = ("schemas", "refused", "agree", "stricter", "looser")
    figures = {name: float(sum(row.get(name, 0) for row in rows)) for name in names}
    publish(report("json_schema", {"draft": "2020-12"}, options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
