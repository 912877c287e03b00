"""What replies of an oracle have cost, and what they may cost."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from nmoe_core.config.quality import OracleTable
from nmoe_core.labels.oracle import Reply

# What servers name if they refuse the form of the answer.
_FORMAT = re.compile(
    r"response[ _]format|json_(?:schema|object)|structured.outputs?|guided|grammar", re.IGNORECASE
)


def refuses_format(status: int, body: str) -> bool:
    """Whether a reply refuses the form of the answer that the request asks for."""
    return status in (400, 422) and _FORMAT.search(body, 0, 2000) is not None


@dataclass(slots=True)
class Spent:
    """Replies about one kind of question, and what they cost in tokens; `retries` counts further
    replies about a text, and `served` counts answers by what the server said that it ran, if it
    said so. `model` is the model that was asked. `refuses_format`: whether the server refused
    the form of the answer."""

    replies: int = 0
    retries: int = 0
    answers: int = 0
    refuses_format: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    served: Counter[str] = field(default_factory=Counter)
    model: str = ""

    def add(self, reply: Reply, *, is_retry: bool) -> None:
        self.replies += 1
        self.retries += is_retry
        self.model = reply.sent.get("model", self.model)
        self.tokens_in += reply.tokens_in
        self.tokens_out += reply.tokens_out
        self.answers += reply.status == 200
        self.refuses_format |= refuses_format(reply.status, reply.body)
        if reply.status == 200 and reply.served:
            self.served[reply.served] += 1


class Budget(NamedTuple):
    """The most that all answers to these `requests` may cost (`Oracle.request_digest`), at the
    prices of a table."""

    table: OracleTable
    max_cost: float
    requests: frozenset[str]

    def cost(self, spent: dict[str, Spent]) -> float:
        """What replies have cost; `spent` is by `Oracle.request_digest`."""
        found = [one for request, one in spent.items() if request in self.requests]
        tokens_in = sum(one.tokens_in for one in found)
        tokens_out = sum(one.tokens_out for one in found)
        return self.table.cost(tokens_in, tokens_out) or 0.0
