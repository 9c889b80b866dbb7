"""What stands on the pages: the figures of real requests, and what their holder's actions do."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from dashboard.stage import ADMIN, SYSTEM, Stage
from dashboard.visits import Forms, Visit
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.terms import Selection, tenant_id
from ostinato.server.dashboard.asked import stop_text
from ostinato.server.dashboard.assets import assets
from ostinato.server.dashboard.overview import figures
from ostinato.server.dashboard.tree import MAX_BYTES, tree_data


@pytest.fixture
def visit(guarded: Stage) -> Visit:
    made = Visit(guarded.url)
    made.sign_in(ADMIN)
    return made


def test_the_overview_counts_what_the_clients_were_told(guarded: Stage) -> None:
    total = guarded.dashboard.history.total()
    assert total.num_requests >= 33
    seen = guarded.dashboard.recent.newest(1000)
    assert total.prompt_tokens == sum(each.usage.prompt_tokens for each in seen)
    assert total.reused_tokens == sum(each.usage.cached_tokens for each in seen) > 0
    before = total.reused_tokens
    with guarded.client("sk-ben") as client:
        asked = [{"role": "user", "content": "How many strings has a hurdy-gurdy? " * 4}]
        told = []
        for _ in range(2):
            reply = client.chat.completions.create(
                model=guarded.engine.runtime.model_name,
                messages=asked,
                max_tokens=3,  # type: ignore[arg-type]
            )
            told.append(reply.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
    assert told[1] > told[0]
    guarded.recorded(2)
    assert guarded.dashboard.history.total().reused_tokens == before + sum(told)


def test_kinds_and_named_prompts_stand_apart(guarded: Stage, visit: Visit) -> None:
    kinds = guarded.dashboard.history.groups("pattern")
    assert {"chat", "agent", "rag", "one_shot", "completion"} <= kinds.keys()
    assert kinds["agent"].hit_rate != kinds["rag"].hit_rate
    prompts = guarded.dashboard.history.groups("prompt")
    assert list(prompts) == ["guide"]
    page = visit.get("/?last=all").text
    for name in ("Chat", "Agent", "RAG", "One-shot", "Completion", "guide"):
        assert f">{name}</a>" in page
    only = visit.get("/dashboard/requests?pattern=rag").text
    assert only.count("<tr>") - 1 == len(
        [e for e in guarded.dashboard.recent.newest(1000) if e.pattern == "rag"]
    )


def test_time_saved_has_a_price_where_the_machines_is_known(guarded: Stage, visit: Visit) -> None:
    assert "money-saved" not in visit.get("/").text
    history, load = guarded.dashboard.history, guarded.engine.runtime.health()
    saved = figures(history, load, "all", dollars_per_hour=3.6)["saved"]
    assert saved.time_s > 0
    assert float(saved.money) == pytest.approx(saved.time_s / 1000)
    assert figures(history, load, "all")["saved"].money is None


def test_the_series_is_one_row_a_step(guarded: Stage, visit: Visit) -> None:
    for last, num in (("300", 60), ("900", 90), ("3600", 60), ("all", 60), ("nonsense", 90)):
        picture = json.loads(visit.get(f"/dashboard/data/series?last={last}").text)
        columns = [picture[name] for name in ("t", "cold", "warm", "requests")]
        assert {len(column) for column in [*columns, *picture["layers"].values()]} == {num}
        assert picture["t"][-1] <= time.time() < picture["t"][-1] + picture["step_s"] + 1
    assert sum(picture["requests"]) > 0
    assert max(share for share in picture["layers"]["arena"] if share is not None) <= 1


def test_a_request_is_painted_by_message_and_source(guarded: Stage, visit: Visit) -> None:
    seen = next(
        e for e in guarded.dashboard.recent.newest(1000) if e.pattern == "chat" and e.num_messages > 4
    )
    page = visit.get(f"/dashboard/requests/{seen.name}").text
    titles = re.findall(r"<h3>(\w+)", page)
    assert [title for title in titles if title != "template"][:4] == ["system", "user", "assistant", "user"]
    assert SYSTEM in page
    assert 'class="piece from-arena"' in page or 'class="piece from-shared"' in page
    assert 'class="piece from-computed"' in page
    parts = [
        int(n.replace(",", "")) for n in re.findall(r'<h3>[^<]*<span class="soft">([\d,]+) tokens', page)
    ]
    assert sum(parts) == seen.usage.prompt_tokens
    assert stop_text(seen) in page


def test_a_purge_takes_the_text_as_well(guarded: Stage, visit: Visit) -> None:
    with guarded.client("sk-ben") as client:
        asked = [{"role": "user", "content": "the-words-of-ben " * 6}]
        model = guarded.engine.runtime.model_name
        client.chat.completions.create(model=model, messages=asked, max_tokens=2)  # type: ignore[arg-type]
    guarded.recorded(1)
    (mine,) = guarded.dashboard.recent.newest(1)
    assert "the-words-of-ben" in visit.get(f"/dashboard/requests/{mine.name}").text
    ben = next(key for key in guarded.dashboard._settings.api_keys if key.name == "key-2")
    guarded.engine.runtime.purge(Selection(tenant=tenant_id(ben.salt)))
    page = visit.get(f"/dashboard/requests/{mine.name}").text
    assert "the-words-of-ben" not in page
    assert "not kept any more" in page
    assert guarded.dashboard.recent.get(mine.name)[1] is None  # type: ignore[index]
    others = [e for e in guarded.dashboard.recent.newest(1000) if e.tenant != mine.tenant]
    assert any(guarded.dashboard.recent.get(e.name)[1] is not None for e in others)  # type: ignore[index]


def test_a_time_to_live_holds_for_the_text_too(guarded: Stage) -> None:
    with guarded.client("sk-anna") as client:
        asked = [{"role": "user", "content": "for a second only " * 3}]
        model = guarded.engine.runtime.model_name
        client.chat.completions.create(
            model=model,
            messages=asked,
            max_tokens=2,
            extra_body={"cache_ttl": 1},  # type: ignore[arg-type]
        )
    guarded.recorded(1)
    (mine,) = guarded.dashboard.recent.newest(1)
    deadline_s = time.monotonic() + 10
    while guarded.dashboard.recent.get(mine.name)[1] is not None:  # type: ignore[index]
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def confirm(visit: Visit, action: str, fields: dict[str, str]) -> str:
    """Fills a form in, reads what is to be confirmed, and confirms it."""
    asked = visit.post(f"/dashboard/actions/{action}", {"token": visit.token()} | fields)
    assert asked.status == 200, asked.text
    assert "?</h1>" in asked.text
    (form,) = Forms(asked.text).by_action[f"/dashboard/actions/{action}"]
    done = visit.post(f"/dashboard/actions/{action}", form | {"confirmed": "yes"})
    assert done.status == 200, done.text
    assert "Done</h1>" in done.text
    return done.text


def test_pin_warm_unpin_and_purge(guarded: Stage, visit: Visit) -> None:
    engine = guarded.engine
    system = "A system text that is to be pinned, long enough to fill some blocks of the arena."
    confirm(visit, "pin", {"system": system, "tenant": "key-1", "ttl_min": "5"})
    (pin,) = engine.cache_summary().pins
    assert pin.expires_in_s == pytest.approx(300, abs=60)
    assert pin.id in visit.get("/dashboard/memory").text
    confirm(visit, "unpin", {"id": pin.id})
    assert engine.cache_summary().pins == ()
    text = "Another system text, that is only to be warm when somebody asks with it in front."
    assert "were computed" in confirm(visit, "warm", {"system": text, "tenant": "key-2"})
    with guarded.client("sk-ben") as client:
        asked = [{"role": "system", "content": text}, {"role": "user", "content": "And?"}]
        reply = client.chat.completions.create(
            model=engine.runtime.model_name,
            messages=asked,
            max_tokens=2,  # type: ignore[arg-type]
        )
    assert reply.usage.prompt_tokens_details.cached_tokens >= len(text)  # type: ignore[union-attr]
    guarded.recorded(1)
    name = guarded.dashboard.recent.newest(1)[0].name
    confirm(visit, "pin", {"request": name})
    (pin,) = engine.cache_summary().pins
    assert "can no longer be found" in confirm(visit, "purge", {"tenant": "key-2"})
    assert engine.cache_summary().pins == ()
    for fields, said in (
        ({}, "Say what to purge"),
        ({"older_than_min": "-1"}, "above 0"),
        ({"older_than_min": "soon"}, "a number of minutes"),
        ({"tenant": "nobody"}, "no tenant"),
    ):
        refused = visit.post("/dashboard/actions/purge", {"token": visit.token()} | fields)
        assert refused.status == 400
        assert said in refused.text
    assert visit.post("/dashboard/actions/dance", {"token": visit.token()}).status == 404
    assert (
        visit.post("/dashboard/actions/unpin", {"token": visit.token(), "id": "x", "confirmed": "yes"}).status
        == 404
    )


# ---------------------------------------------------------------- the tree's data


SPACE = Namespace("w", "t", "c", "l", "d", "r")


def grown(num_prompts: int, seed: int = 0) -> KVManager:
    """An index of many nodes: prompts with shared beginnings of several depths."""
    manager = KVManager(1 << 17, 4)
    rng = np.random.default_rng(seed)
    roots = [rng.integers(0, 50_000, 40) for _ in range(20)]
    for _ in range(num_prompts):
        parts = [
            roots[rng.integers(20)],
            rng.integers(0, 6, rng.integers(1, 20)),
            rng.integers(0, 50_000, 12),
        ]
        tokens = np.concatenate(parts).astype(np.int32)
        with manager.acquire(SPACE, tokens) as lease:
            assert lease.reserve(len(tokens))
            lease.take_copies()
            lease.commit(tokens)
    return manager


def picture_of(manager: KVManager, **options: object) -> dict[str, list[int]]:
    survey = manager.surveyor.survey()
    made = tree_data(
        survey,
        tenant_name=lambda tenant: tenant,
        prompt_name={},
        text_of=lambda tokens: "\u3042" * 80,
        **options,  # type: ignore[arg-type]
    )
    assert made is not None
    assert len(made) <= MAX_BYTES
    return json.loads(made)  # type: ignore[no-any-return]


def test_the_picture_of_a_large_tree_is_bounded_and_adds_up() -> None:
    manager = grown(9_000)
    survey = manager.surveyor.survey()
    assert len(survey.nodes) > 10_000
    picture = picture_of(manager)
    assert len(picture["id"]) >= 10_000
    assert picture["total"][0] == manager.num_cached_tokens
    assert picture["num_nodes"] == len(survey.nodes)
    assert len([i for i in picture["id"] if i]) + sum(picture["left_out"]) == len(survey.nodes)
    for place in range(1, len(picture["id"])):
        assert picture["parent"][place] < place
        assert picture["total"][place] <= picture["total"][picture["parent"][place]]
    few = picture_of(manager, max_nodes=100)
    assert len(few["id"]) == 100
    assert len([i for i in few["id"] if i]) + sum(few["left_out"]) == len(survey.nodes)
    assert picture_of(manager, max_bytes=20_000)["total"][0] == manager.num_cached_tokens


def test_a_picture_from_a_node_on_has_all_that_is_below() -> None:
    manager = grown(300)
    survey = manager.surveyor.survey()
    for node in survey.nodes[:40]:
        facts = manager.surveyor.facts(node.serial)
        assert facts is not None
        picture = picture_of(manager, root=node.serial)
        assert picture["id"][0] == node.serial
        assert picture["parent"][0] == -1
        assert len(picture["id"]) == 1 + facts.num_nodes_below
        assert picture["total"][0] == node.num_tokens + facts.tokens_below
    assert tree_data(survey, root=10**9, tenant_name=str, prompt_name={}, text_of=None) is None


# ---------------------------------------------------------------- vendored files


def test_vendored_files_are_those_of_their_packages() -> None:
    import hashlib
    import tomllib
    from importlib.resources import files

    folder = files("ostinato.server.dashboard") / "static" / "vendor"
    known: dict[str, str] = {}
    for name, table in tomllib.loads((folder / "vendor.toml").read_text("utf-8")).items():
        assert table["licence"] in ("0BSD", "MIT"), name
        assert any(file.endswith(".LICENSE") for file in table["files"]), name
        known |= table["files"]
    found = {item.name: hashlib.sha256(item.read_bytes()).hexdigest() for item in folder.iterdir()}
    found.pop("vendor.toml")
    assert found == known


def test_pages_ask_for_nothing_elsewhere() -> None:
    for path, asset in assets().items():
        if path.startswith("vendor/"):
            continue
        outside = [url for url in re.findall(rb"https?://[^\s\"')]+", asset.body) if b"www.w3.org" not in url]
        assert outside == [], path


# ---------------------------------------------------------------- two requests beside each other


def test_two_requests_are_compared_token_by_token(guarded: Stage, visit: Visit) -> None:
    rules = "Answer in three sentences at most, name your sources, and never guess a year. " * 3
    model = guarded.engine.runtime.model_name
    names = []
    for day in ("Tuesday, 1 December 2026", "Wednesday, 2 December 2026"):
        talk = [
            {"role": "system", "content": f"Today is {day}. {rules}"},
            {"role": "user", "content": "And?"},
        ]
        with guarded.client("sk-anna") as client:
            reply = client.chat.completions.create(model=model, messages=talk, max_tokens=2)  # type: ignore[arg-type]
        names.append(reply.id)
        guarded.remembered(reply.id)
    older, newer = names
    page = visit.get(f"/dashboard/requests/{newer}").text
    first = re.findall(r'<option value="([^"]+)">([\d,]+) tokens alike', page)[0]
    assert first[0] == older, "the one that begins most like it is offered first"
    page = visit.get(f"/dashboard/diff?a={older}&b={newer}").text
    assert "then: timestamp in messages[0] (system)" in page
    assert re.search(r"<del>[^<]*Tu", page)
    assert re.search(r"<ins>[^<]*Wedn", page)
    assert "no prefix cache finds them" in page
    assert "only in the second" in page
    same = visit.get(f"/dashboard/diff?a={newer}&b={newer}").text
    assert "Their prompts are the same" in same
    assert visit.get(f"/dashboard/diff?a={newer}&b=none").status == 404
    assert Visit(guarded.url).get(f"/dashboard/diff?a={newer}&b={older}", follow=False).status == 303
