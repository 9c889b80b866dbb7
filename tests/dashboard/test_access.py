"""Who gets to see what, and whose forms are believed."""

from __future__ import annotations

import pytest

import ostinato
from dashboard.stage import ADMIN, ATTACK, Stage, on_stage
from dashboard.visits import Visit

PAGES = ["/", "/dashboard/requests", "/dashboard/memory", "/dashboard/tree"]
PARTS = [
    "/dashboard/parts/overview",
    "/dashboard/parts/requests",
    "/dashboard/data/series",
    "/dashboard/data/tree",
]


def a_request(stage: Stage) -> str:
    return stage.dashboard.recent.newest(1)[0].name


def test_without_keys_there_are_figures_and_no_text(open_stage: Stage) -> None:
    with open_stage.client() as client:
        said = [{"role": "user", "content": "a-very-secret-question " * 3}]
        model = open_stage.engine.runtime.model_name
        client.chat.completions.create(model=model, messages=said, max_tokens=3)  # type: ignore[arg-type]
    open_stage.recorded(1)
    visit = Visit(open_stage.url)
    serial = open_stage.engine.runtime.surveyor.survey().nodes[0].serial
    more = [
        f"/dashboard/requests/{a_request(open_stage)}",
        f"/dashboard/tree/{serial}",
        "/dashboard/parts/widest",
    ]
    for path in [*PAGES, *PARTS, *more]:
        page = visit.get(path)
        assert page.status == 200, path
        assert "secret" not in page.text, path
        assert '<form method="post"' not in page.text, path
    assert open_stage.dashboard.recent.get(a_request(open_stage))[1] is None  # type: ignore[index]
    for name in ("purge", "pin", "unpin", "warm"):
        assert (
            visit.post(f"/dashboard/actions/{name}", {"everything": "yes", "confirmed": "yes"}).status == 405
        )


def test_an_admin_key_has_to_be_given_first(guarded: Stage) -> None:
    visit = Visit(guarded.url)
    for path in [*PAGES, f"/dashboard/requests/{a_request(guarded)}"]:
        page = visit.get(path, follow=False)
        assert (page.status, page.headers["location"]) == (303, "/dashboard/sign-in"), path
        assert page.text == ""
    for path in PARTS:
        page = visit.get(path)
        assert (page.status, page.text, page.headers["hx-redirect"]) == (401, "", "/dashboard/sign-in"), path
    for key in ("wrong", "sk-anna", ""):
        assert visit.sign_in(key).status == 401
        assert visit.get("/", follow=False).status == 303
    assert visit.post("/dashboard/actions/purge", {"everything": "yes"}, follow=False).status == 303
    assert visit.sign_in(ADMIN).url == guarded.url + "/"
    for path in [*PAGES, *PARTS]:
        assert visit.get(path).status == 200, path
    assert visit.post("/dashboard/sign-out", {}).status == 200
    assert visit.get("/", follow=False).status == 303


def test_the_cookie_is_for_this_server_only_and_no_key(guarded: Stage) -> None:
    visit = Visit(guarded.url)
    page = visit.post("/dashboard/sign-in", {"key": ADMIN}, follow=False)
    cookie = page.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ADMIN not in cookie
    forged = Visit(guarded.url)
    assert forged.get("/", follow=False, cookie="ostinato-session=x").status == 303


def test_api_keys_without_an_admin_key_lock_the_door(tiny: object) -> None:
    with ostinato.load(tiny, kv_cache="1MiB") as engine, on_stage(engine, api_keys="sk-anna") as stage:  # type: ignore[arg-type]
        visit = Visit(stage.url)
        for path in PAGES:
            page = visit.get(path)
            assert page.status == 403
            assert "OSTINATO_ADMIN_KEY" in page.text
        assert visit.sign_in("sk-anna").status == 403
        assert visit.get("/dashboard/data/series").status == 401


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
)
def test_a_form_of_another_site_does_nothing(guarded: Stage, headers: dict[str, str]) -> None:
    visit = Visit(guarded.url)
    visit.sign_in(ADMIN)
    fields = {"token": visit.token(), "system": "x" * 80, "confirmed": "yes"}
    assert visit.post("/dashboard/actions/pin", fields, **headers).status == 403
    assert guarded.engine.cache_summary().pins == ()


def test_a_form_needs_its_own_token(guarded: Stage) -> None:
    visit, other = Visit(guarded.url), Visit(guarded.url)
    visit.sign_in(ADMIN)
    other.sign_in(ADMIN)
    for token in ("", "0" * 64, other.token(), "\ud83d"):
        fields = {"token": token.encode("utf-8", "replace").decode(), "everything": "yes", "confirmed": "yes"}
        assert visit.post("/dashboard/actions/purge", fields).status == 403


def test_everything_is_sent_with_a_strict_policy(guarded: Stage) -> None:
    visit = Visit(guarded.url)
    pages = [visit.get("/dashboard/sign-in"), visit.sign_in("wrong"), visit.get("/dashboard/data/series")]
    visit.sign_in(ADMIN)
    pages += [
        visit.get(path) for path in [*PAGES, *PARTS, "/dashboard/requests/none", "/dashboard/tree/999999"]
    ]
    pages += [visit.get("/dashboard/static/dashboard.css"), visit.get("/dashboard/static/none.css")]
    for page in pages:
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy, page.url
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["x-frame-options"] == "DENY"
        if (page.headers["content-type"] or "").startswith("text/html"):
            assert page.headers["cache-control"] == "no-store"
            assert " style=" not in page.text
            assert "<style" not in page.text
            assert "onclick" not in page.text


def test_what_clients_chose_is_text_on_every_page(guarded: Stage) -> None:
    model = guarded.engine.runtime.model_name
    with guarded.client("sk-anna") as client:
        for _ in range(2):
            client.chat.completions.create(
                model=model,
                messages=[{"role": "system", "content": ATTACK}, {"role": "user", "content": ATTACK * 3}],
                max_tokens=2,
                extra_headers={"x-request-id": "a.b"},
                extra_body={"cache_salt": ATTACK, "session": ATTACK},
            )
    guarded.recorded(2)
    visit = Visit(guarded.url)
    visit.sign_in(ADMIN)
    name = a_request(guarded)
    surveyor = guarded.engine.runtime.surveyor
    serials = [node.serial for node in surveyor.survey().nodes]
    pages = [*PAGES, f"/dashboard/requests/{name}", *(f"/dashboard/tree/{serial}" for serial in serials)]
    pages += [f"/dashboard/requests?pattern={ATTACK_QUERY}&prompt={ATTACK_QUERY}&tenant={ATTACK_QUERY}"]
    pages += [f"/dashboard/requests/{ATTACK_QUERY}", f"/?last={ATTACK_QUERY}"]
    texts = [visit.get(path).text for path in pages]
    fields = {"token": visit.token(), "system": ATTACK}
    texts.append(visit.post("/dashboard/actions/pin", fields).text)
    for text in texts:
        assert "<script>window" not in text
        assert "<img src=x" not in text
        assert "370371" not in text  # what looks like a template is none
    assert any("&lt;script&gt;window.hacked" in text for text in texts)


ATTACK_QUERY = "%3Cscript%3Ewindow.hacked=1%3C/script%3E%22%3E%3Cimg%20src=x%20onerror=x%3E"
