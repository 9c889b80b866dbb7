"""The dashboard in real Chromium, before a real engine with real traffic."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("playwright", reason="the browser's tests need playwright: pip install playwright")

from playwright.sync_api import Browser, Page, expect

import ostinato
from dashboard.browser import Watched, chromium
from dashboard.stage import ATTACK, Stage, on_stage, play

Open = Callable[..., Watched]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser, guarded: Stage) -> Iterator[Open]:
    """Opens pages as somebody who is signed in; at the end none may have complained."""
    opened: list[Watched] = []

    def visit(**options: object) -> Watched:
        watched = Watched(browser, guarded.url, **options)
        opened.append(watched)
        watched.sign_in()
        return watched

    yield visit
    for watched in opened:
        watched.close()


def pages_of(stage: Stage) -> list[str]:
    chat = next(e for e in stage.dashboard.recent.newest(1000) if e.num_messages > 4)
    survey = stage.engine.runtime.surveyor.survey()
    widest = max(survey.nodes, key=lambda node: node.num_tokens)
    return [
        *("/", "/dashboard/tree", "/dashboard/requests", "/dashboard/memory"),
        *(f"/dashboard/requests/{chat.name}", f"/dashboard/tree/{widest.serial}"),
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_fault_for_anyone(visit: Open, guarded: Stage, scheme: str) -> None:
    watched = visit(color_scheme=scheme)
    for path in pages_of(guarded):
        page = watched.go(path)
        expect(page.locator("h1")).to_be_visible()
        if path == "/dashboard/tree":
            expect(page.locator("#icicle[data-ready]")).to_be_visible()
        assert watched.faults() == [], path


def test_who_is_not_signed_in_meets_no_fault_either(browser: Browser, guarded: Stage) -> None:
    watched = Watched(browser, guarded.url)
    watched.go("/")
    assert watched.faults() == []
    watched.page.get_by_label("Admin key").fill("wrong")
    watched.page.get_by_role("button", name="Sign in").click()
    expect(watched.page.get_by_role("alert")).to_have_text("This is not the admin key.")
    assert watched.faults() == []
    watched.complaints = [text for text in watched.complaints if "401" not in text]  # its own status
    watched.close()


def test_narrow_pages_do_not_scroll_sideways(visit: Open, guarded: Stage) -> None:
    watched = visit(viewport={"width": 390, "height": 844})
    for path in pages_of(guarded):
        page = watched.go(path)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, path


def test_figures_and_charts_follow_the_traffic(visit: Open, guarded: Stage) -> None:
    watched = visit()
    page = watched.go("/?last=all")
    before = int(page.locator("#num-requests").inner_text())
    for place in ("#chart-layers", "#chart-ttft"):
        expect(page.locator(f"{place} canvas")).to_be_visible()
    expect(page.locator("#chart-layers .u-legend")).to_contain_text("memory")
    with guarded.client("sk-anna") as client:
        guarded.recorded(play(client, guarded.engine.runtime.model_name))
    expect(page.locator("#num-requests")).to_have_text(str(before + 11))
    expect(page.locator("#tables .requests tbody tr").first).to_contain_text("Completion")


def test_a_paused_page_stays_as_it_is(visit: Open, guarded: Stage) -> None:
    watched = visit()
    page = watched.go("/?last=all")
    page.get_by_role("button", name="Pause").click()
    before = page.locator("#num-requests").inner_text()
    with guarded.client("sk-anna") as client:
        guarded.recorded(play(client, guarded.engine.runtime.model_name))
    page.wait_for_timeout(2600)
    assert page.locator("#num-requests").inner_text() == before
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#num-requests")).not_to_have_text(before)


def test_a_row_stays_while_somebody_is_about_to_open_it(visit: Open, guarded: Stage) -> None:
    page = visit().go("/dashboard/requests")
    first = page.locator("#rows tbody tr a").first
    first.hover()
    before = first.get_attribute("href")
    with guarded.client("sk-anna") as client:
        guarded.recorded(play(client, guarded.engine.runtime.model_name))
    page.wait_for_timeout(4000)
    assert first.get_attribute("href") == before
    page.mouse.move(1, 1)
    expect(first).not_to_have_attribute("href", before or "")


def said(page: Page) -> str:
    return page.locator("#icicle-said").inner_text()


def test_the_tree_is_walked_by_keys(visit: Open, guarded: Stage) -> None:
    watched = visit()
    page = watched.go("/dashboard/tree")
    box = page.locator("#icicle[data-ready]")
    expect(box).to_be_visible()
    box.focus()
    words = [said(page)]
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
        words.append(said(page))
    assert len(set(words)) >= 3
    assert "of its own" in words[2]
    page.keyboard.press("Enter")
    expect(page.locator("#crumbs [aria-current]")).to_be_visible()
    expect(page.locator("#widest h2")).to_have_text("What goes on from here")
    page.keyboard.press("Backspace")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("o")
    page.wait_for_url(re.compile(r"/dashboard/tree/\d+$"))
    expect(page.locator("h1")).to_contain_text("Node")
    page.get_by_role("link", name="Show it in the tree").click()
    expect(page.locator("#icicle[data-ready]")).to_be_visible()


def test_the_tree_is_walked_by_mouse_and_has_colours_and_hatching(visit: Open, guarded: Stage) -> None:
    pin = guarded.engine.pin([{"role": "system", "content": "This is pinned, so that it is hatched. " * 4}])
    watched = visit()
    page = watched.go("/dashboard/tree")
    box = page.locator("#icicle[data-ready]")
    expect(box).to_be_visible()
    size = box.bounding_box()
    assert size is not None
    page.mouse.move(size["x"] + 40, size["y"] + 40)
    assert "tokens" in said(page)
    page.mouse.click(size["x"] + 40, size["y"] + 40)
    expect(page.locator("#crumbs [aria-current]")).to_be_visible()
    page.get_by_role("button", name="how lately").click()
    expect(page.locator("#ramp-words")).to_have_text("long ago to just now")
    pinned = page.evaluate("ostinato.icicle.pictures[0].pinned.filter(n => n > 0).length")
    assert pinned > 0
    survey = guarded.engine.runtime.surveyor.survey()
    serial = next(node.serial for node in survey.nodes if node.num_pins)
    page = watched.go(f"/dashboard/tree/{serial}")
    expect(page.get_by_text("by 1 pin")).to_be_visible()
    assert guarded.engine.unpin(pin)


def test_pin_unpin_and_purge_with_confirmation(visit: Open, guarded: Stage) -> None:
    watched = visit()
    page = watched.go("/dashboard/memory")
    page.get_by_label("System text that prompts begin with").fill("You are pinned in a browser. " * 3)
    page.get_by_role("button", name="Pin…").click()
    expect(page.locator("h1")).to_have_text("Pin?")
    assert guarded.engine.cache_summary().pins == ()
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.locator("h1")).to_have_text("Done")
    (pin,) = guarded.engine.cache_summary().pins
    page.get_by_role("link", name="Back to memory").click()
    page.get_by_role("button", name=f"Unpin {pin.id}").click()
    page.get_by_role("button", name="Unpin", exact=True).click()
    expect(page.locator("h1")).to_have_text("Done")
    assert guarded.engine.cache_summary().pins == ()
    page.get_by_role("link", name="Back to memory").click()
    page.get_by_role("button", name="Purge…").click()
    expect(page.get_by_role("alert")).to_contain_text("Say what to purge")
    watched.complaints = [text for text in watched.complaints if "400" not in text]  # its own status
    page.go_back()
    page.get_by_label("Everything, of everyone").check()
    page.get_by_role("button", name="Purge…").click()
    page.get_by_role("link", name="Cancel").click()
    assert guarded.engine.runtime.surveyor.survey().nodes != ()
    page.get_by_label("Everything, of everyone").check()
    page.get_by_role("button", name="Purge…").click()
    page.get_by_role("button", name="Purge", exact=True).click()
    expect(page.locator("h1")).to_have_text("Done")
    assert guarded.engine.runtime.surveyor.survey().nodes == ()
    with guarded.client("sk-anna") as client:  # for the tests after this one
        guarded.recorded(play(client, guarded.engine.runtime.model_name))


def test_an_attack_in_a_prompt_stays_text(visit: Open, guarded: Stage) -> None:
    with guarded.client("sk-anna") as client:
        for _ in range(2):
            client.chat.completions.create(
                model=guarded.engine.runtime.model_name,
                messages=[{"role": "system", "content": ATTACK}, {"role": "user", "content": ATTACK * 2}],
                max_tokens=2,
            )
    guarded.recorded(2)
    watched = visit()
    name = guarded.dashboard.recent.newest(1)[0].name
    serials = [node.serial for node in guarded.engine.runtime.surveyor.survey().nodes]
    for path in ("/", "/dashboard/tree", f"/dashboard/requests/{name}", f"/dashboard/tree/{serials[-1]}"):
        page = watched.go(path)
        if path == "/dashboard/tree":
            box = page.locator("#icicle[data-ready]")
            expect(box).to_be_visible()
            box.focus()
            for key in ("ArrowDown", "Enter", "ArrowDown"):
                page.keyboard.press(key)
        assert page.evaluate("typeof window.hacked") == "undefined"
    watched.go(f"/dashboard/requests/{name}")
    expect(watched.page.get_by_text("<script>window.hacked = 1</script>").first).to_be_visible()


def test_the_theme_is_chosen_and_remembered(visit: Open, guarded: Stage) -> None:
    watched = visit(color_scheme="light")
    page = watched.go("/dashboard/requests")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("#theme").click()
    assert page.evaluate(paper) == light
    page.locator("#theme").click()
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == dark
    page.locator("#theme").click()
    assert page.evaluate(paper) == light


def test_the_first_key_offers_to_skip_what_every_page_has(visit: Open) -> None:
    page = visit().go("/dashboard/memory")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


def test_ten_thousand_nodes_are_drawn(browser: Browser, tiny: Path) -> None:
    with ostinato.load(tiny, kv_cache="160MiB", block_size=4) as engine, on_stage(engine) as stage:
        view = engine.runtime.cache()
        rng = np.random.default_rng(0)
        heads = [rng.integers(0, 256, 40) for _ in range(20)]
        for _ in range(9_000):  # what requests leave in the books; nobody computes with them
            parts = [
                heads[rng.integers(20)],
                rng.integers(0, 6, rng.integers(1, 20)),
                rng.integers(0, 256, 12),
            ]
            tokens = np.concatenate(parts).astype(np.int32)
            with view.acquire(tokens) as lease:
                assert lease.reserve(len(tokens))
                lease.take_copies()
                lease.commit(tokens)
        num_nodes = len(engine.runtime.surveyor.survey().nodes)
        assert num_nodes >= 10_000
        watched = Watched(browser, stage.url)
        page = watched.go("/dashboard/tree")
        expect(page.locator("#icicle[data-ready]")).to_be_visible()
        shown = int(page.locator("#icicle").get_attribute("data-ready") or 0)
        assert shown >= 10_000
        num_drawn = page.evaluate("ostinato.icicle.drawn.length")
        assert 100 < num_drawn < 10_000, "what is drawn can be seen"
        page.locator("#icicle").focus()
        for _ in range(3):
            page.keyboard.press("ArrowDown")
            page.keyboard.press("Enter")
        expect(page.locator("#icicle-said")).to_contain_text("of its own")
        assert watched.faults() == []
        watched.close()
