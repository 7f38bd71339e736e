from __future__ import annotations

import json
import logging
import sys

from node_agent.log import JsonLines


def test_a_line_is_one_json_object_with_the_extra_fields() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failure = sys.exc_info()
    record = logging.LogRecord("here", logging.WARNING, "file", 1, "it is %s\n", ("so",), failure)
    record.request = "r1"
    record.where = {"path": object}
    line = JsonLines("api").format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["process"], fields["level"], fields["logger"]) == ("api", "warning", "here")
    assert (fields["message"], fields["request"]) == ("it is so\n", "r1")
    assert "ValueError" in fields["exception"]
