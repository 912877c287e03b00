"""A judge's server that scores documents by any rubric: more words are better."""

import json
from typing import Any

from nmoe_core.labels.scores import Scale
from tests.core.labels.oracles.server import MODEL, JudgeServer, Reply, completion


def scores_of(document: str, scale: Scale) -> dict[str, int]:
    """A judge that heads can learn from."""
    share = min(len(document.split()) / 40, 1)
    grades = zip(scale.names, scale.lowest, scale.highest)
    return {name: round(low + share * (high - low)) for name, low, high in grades}


def answering(server: JudgeServer, scale: Scale) -> None:
    def behave(document: str, nth: int) -> Reply:
        return completion(json.dumps(scores_of(document, scale)))

    server.behave = behave


def oracle_of(server: JudgeServer, rubric: str) -> dict[str, Any]:
    http = {"base_url": server.url, "model": MODEL}
    return {"max_doc_tokens": 32, "kind": "http", "rubric": rubric, "http": http}
