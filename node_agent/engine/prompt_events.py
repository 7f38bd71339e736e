"""What a pass computed of prompts' log probabilities, as events of the requests that asked for them."""

from __future__ import annotations

from node_agent.engine.batch import Row
from node_agent.engine.request import Request
from node_agent.ipc import PromptScored, Top
from node_agent.types import ScoredToken

SCORES_PER_EVENT = 256
"""With 64 alternatives each an event stays below a megabyte."""


def split_scores(rows: list[Row], scores: list[ScoredToken]) -> list[tuple[Request, range, list[ScoredToken]]]:
    """Returns, for each row that has prompt scores, the request, the places of the prompt's tokens, and their scores.
    Must be called before `computed` moves on, for rows tell their places by it."""
    found: list[tuple[Request, range, list[ScoredToken]]] = []
    begin = 0
    for row in rows if scores else ():
        places = row.scored
        if places:
            found.append((row.request, places, scores[begin : begin + len(places)]))
            begin += len(places)
    return found


def score_events(request: Request, places: range, scores: list[ScoredToken]) -> list[PromptScored]:
    tops = [Top(score.logprob, score.top, score.rank) for score in scores]
    return [
        PromptScored(request.id, places.start + at, tops[at : at + SCORES_PER_EVENT])
        for at in range(0, len(tops), SCORES_PER_EVENT)
    ]
