"""A remix certificate is recomputed by code that is written from docs/formats.md alone."""

import hashlib
import json
import re
import struct
from math import gcd
from typing import Any

from loader import remix, resolve_plan
from tests.project import REPOSITORY


def picks_of(stage: dict[str, Any]) -> list[str]:
    """The source of each sequence of a stage under `swrr`."""
    sources = stage["sources"]
    left = {s["name"]: s["quota_sequences"] for s in sources}
    unread = sum(s.get("unread_sequences", 0) for s in sources)
    credit = dict.fromkeys(left, 0)
    picks: list[str] = []
    starts = True
    for _ in range(sum(left.values()) - unread):
        active = [s for s in sources if left[s["name"]]]
        total = sum(s["weight"] for s in active)
        if starts:
            divisor = gcd(*(s["weight"] for s in active))
            were_read = {s["name"] for s in active} & set(picks)
            for s in active:
                owed = 0 if were_read else s.get("owed_millionths", 0)
                credit[s["name"]] = divisor * (owed * total // (10**6 * divisor))
        for s in active:
            credit[s["name"]] += s["weight"]
        best = max(active, key=lambda s: credit[s["name"]])["name"]
        credit[best] -= total
        left[best] -= 1
        starts = left[best] == 0
        picks.append(best)
    return picks


def order_of(plan: dict[str, Any]) -> list[tuple[str, int]]:
    """Source and window of each sequence."""
    places = {row["source"]: row["sequences"] for row in plan.get("consumed", [])}
    order = []
    for stage in plan["stages"]:
        for name in picks_of(stage):
            order.append((name, places.setdefault(name, 0)))
            places[name] += 1
    return order


def prefix_of(order: list[tuple[str, int]], n: int) -> str:
    names = sorted({name for name, _ in order[:n]})
    digest = hashlib.sha256("\n".join([str(n), *names]).encode())
    for start in range(0, n, 65_536):
        chunk = order[start : min(n, start + 65_536)]
        digest.update(struct.pack(f"<{len(chunk)}q", *(names.index(name) for name, _ in chunk)))
        digest.update(struct.pack(f"<{len(chunk)}q", *(window for _, window in chunk)))
    return digest.hexdigest()


def windows_of(plan: dict[str, Any], n: int) -> list[dict[str, Any]]:
    order = order_of(plan)
    end = len(order) // plan["batch_size"] * plan["batch_size"]
    hashes = {s["name"]: s["content_hash"] for t in plan["stages"] for s in t["sources"]}
    consumed = {row["source"]: row["sequences"] for row in plan.get("consumed", [])}
    rows = []
    for name, content_hash in hashes.items():
        first = consumed.get(name, 0)
        edit = first + sum(one == name for one, _ in order[:n])
        stop = edit + sum(one == name for one, _ in order[n:end])
        rows.append(
            {
                "source": name,
                "content_hash": content_hash,
                "before": [first, edit],
                "after": [edit, stop],
            }
        )
    return rows


def sha256_of(value: dict[str, Any], *, is_escaped: bool) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=is_escaped)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_hash_of(plan: dict[str, Any]) -> str:
    value = {k: v for k, v in plan.items() if k not in ("plan_hash", "plan_id", "root")}
    value["stages"] = [{k: v for k, v in s.items() if k != "mixture"} for s in plan["stages"]]
    for stage in value["stages"]:
        stage["sources"] = [
            {k: v for k, v in source.items() if k not in ("manifest", "spec")}
            for source in stage["sources"]
        ]
    return sha256_of(value, is_escaped=True)


def test_the_test_vector_of_the_page_is_made_by_what_the_page_says() -> None:
    page = (REPOSITORY / "docs" / "formats.md").read_text("utf-8")
    (vector,) = [
        json.loads(block)
        for block in re.findall("```json\n(.*?)```", page, re.DOTALL)
        if "prefix_sha256" in block
    ]
    order = order_of(vector["plan"])
    assert [[*one] for one in order] == vector["order"]
    assert prefix_of(order, vector["sequence"]) == vector["prefix_sha256"]
    assert sha256_of(vector["object"], is_escaped=False) == vector["as_certificate"]
    assert sha256_of(vector["object"], is_escaped=True) == vector["as_plan"]


def test_a_certificate_is_recomputed_from_the_page_of_formats(tree, tmp_path):
    """The prefix has two chunks; the second edit makes a stage that is cut, with debts."""
    for name in ("web", "code", "cat\u00e9"):
        tree.add(name, 60_000)
    rows = tree.rows(web=5, code=2)
    plan = resolve_plan({"datasets": rows, "batch_size": 1000, "seq_len": 1, "steps": 80})
    new = {"cat\u00e9": tree.root / "cat\u00e9"}
    middle, _ = remix(plan, 67, weights={"cat\u00e9": 4, "code": 3}, sources=new)
    after, certificate = remix(middle, 69, weights={"web": 1, "cat\u00e9": 6, "code": 2})
    value = json.loads(certificate.to_json(tmp_path))
    n = value["sequence"]
    made: dict[str, Any] = {
        "format": "nmoe-remix/1",
        "step": 69,
        "sequence": 69 * value["plan_before"]["batch_size"],
        "prefix_sha256": prefix_of(order_of(value["plan_before"]), n),
        "sources": windows_of(value["plan_after"], n),
        "plan_before": json.loads(middle.placed_in(tmp_path).to_json()),
        "plan_after": json.loads(after.placed_in(tmp_path).to_json()),
    }
    assert made | {"content_hash": sha256_of(made, is_escaped=False)} == value
    assert prefix_of(order_of(value["plan_after"]), n) == value["prefix_sha256"]
    for key in ("plan_before", "plan_after"):
        assert plan_hash_of(value[key]) == value[key]["plan_hash"]
    owed = [s for t in after.stages for s in t.sources if s.owed_millionths]
    assert owed
    assert any(s.unread_sequences for t in after.stages for s in t.sources)
