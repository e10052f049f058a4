"""The inspector in a browser: what it shows of a real engine at work, its playground by keyboard alone, and how it fits.

Chromium is Debian's; where there is none, or no playwright to drive it, the tests are skipped by name.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine; on Debian: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def wait(page, condition, seconds=60):
    """Waits until a condition in JavaScript holds. The page's policy forbids playwright's own way, which evaluates a string in it."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


@pytest.fixture
def page_of(browser, model_server):
    """Opens the page; afterwards no script may have failed, and nothing may have been asked of another host."""
    complaints, asked, pages = [], [], []

    def open_page(width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(model_server.url)
        wait(page, "document.querySelector('#model').textContent !== ''")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []
    assert all(url.startswith(model_server.url) for url in asked), asked


@pytest.fixture
def asked(model_server):
    """A program of three calls that share a beginning, one of them under a schema."""
    system = {"role": "system", "content": "You answer like a lighthouse keeper of few words."}
    schema = {"type": "object", "properties": {"lighthouse_name": {"enum": ["Skagen", "Lindau"]}}, "required": ["lighthouse_name"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with model_server.client(headers={"X-Agentrt-Program": "keeper"}) as http:
        http.post("/flush_cache")
        for more, text in (({}, "Is it windy?"), ({}, "Is it late?"), ({"response_format": form}, "Which one?")):
            http.post("/v1/chat/completions", json={"messages": [system, {"role": "user", "content": text}], "max_tokens": 12, **more})


def tile(page, name):
    return page.locator(f'meter-tile[name="{name}"]')


def test_it_shows_rates_the_tree_and_each_programs_report(page_of, model_server, asked):
    page = page_of()
    assert page.locator("#model").text_content() == model_server.service.names[0]
    assert "pool 16,384 tokens" in page.locator("#status").text_content()
    roots = page.locator("prefix-tree > ul > li")
    roots.first.wait_for()
    assert "lighthouse keeper" in page.locator("prefix-tree").text_content()
    nested = page.locator("prefix-tree ul ul .path")  # the tree parts where the questions do
    assert nested.count() >= 2
    assert re.search(r"from token 0; [1-9][0-9,]* tokens served; holds [0-9,]+, .*% of the pool", roots.first.text_content())
    for name in ("hits", "forced"):  # some, however much else this server was asked before
        assert re.fullmatch(r"(?!0\.0 )(<0\.1|[0-9]+\.[0-9]) % since the start", tile(page, name).locator(".note").text_content())
    page.locator("program-book summary", has_text="keeper").click()
    rows = page.locator("program-book details[open] tbody tr")
    rows.nth(2).wait_for()
    why = [row.locator("td.text").text_content() for row in rows.all()]
    assert why[0].endswith('never seen, from "<|im_start|>" on')
    assert all("never seen, from" in each for each in why[1:])
    reused = [int(row.locator("td").nth(2).text_content()) for row in rows.all()]
    assert reused[0] == 0 < min(reused[1:])
    with page.expect_popup() as popup:
        page.get_by_role("link", name="The whole report").click()
    popup.value.wait_for_selector("h1")
    assert popup.value.locator("h1").text_content() == "keeper"
    popup.value.close()


def test_it_shows_a_request_while_it_runs_and_what_it_reused(page_of, model_server, asked):
    page = page_of()
    ask = {"messages": [{"role": "system", "content": "You answer like a lighthouse keeper of few words."}, {"role": "user", "content": "Is it windy? Tell me all of it."}]}
    with model_server.client() as http, http.stream("POST", "/v1/chat/completions", json=ask | {"stream": True, "max_tokens": 8000, "ignore_eos": True}) as answer:
        lines = answer.iter_lines()
        row = page.locator("#calls tbody tr").first
        for _ in itertools.takewhile(lambda _: not row.count(), lines):
            page.wait_for_timeout(50)
        wait(page, "document.querySelector('#calls tbody tr td:nth-child(7)')?.textContent > '1'")
        cells = row.locator("td").all_text_contents()
        wait(page, "parseFloat(document.querySelector('meter-tile[name=tokens] .value').textContent) > 0")
        assert tile(page, "requests").locator(".value").text_content() == "1 + 0"
    assert cells[1] == "running"
    prompt, reused, computed = (int(cell.replace(",", "")) for cell in cells[3:6])
    assert reused > 10  # the system message of the program before it
    assert reused + computed in (prompt, prompt - 1)
    wait(page, "document.querySelector('#calls tbody tr') === null")  # hung up on: it is gone
    page.locator("summary", has_text="Ended lately").click()
    assert page.locator("#recent tbody tr").first.locator("td").nth(1).text_content() in ("client_gone", "length")


@pytest.fixture
def held_ends(monkeypatch, model_server):
    """The ends of answers, kept until they are let go: what is shown before that has come in a stream."""
    kept, backend = [], model_server.backend
    submit = backend.submit
    monkeypatch.setattr(backend, "submit", lambda request, sink: submit(request, lambda delta: kept.append((sink, delta)) if delta.last else sink(delta)))
    yield kept
    for sink, delta in kept:
        sink(delta)


@pytest.mark.parametrize("kind", ["schema", "required"])
def test_the_playground_is_used_by_keyboard_alone_and_streams(page_of, held_ends, kind):
    page = page_of()
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the playground"
    press("Enter")
    press("Tab")
    assert page.evaluate("document.activeElement.name") == "message"
    press("Tab") if page.evaluate("document.querySelector('[name=form]').disabled") is False else None
    for _ in range(3):
        if page.evaluate("document.activeElement.name") == "kind":
            break
        press("Tab")
    page.keyboard.type({"schema": "JSON", "required": "Tools, one"}[kind])
    assert page.evaluate("document.activeElement.value") == kind
    press("Shift+Tab")
    press("Control+Enter")
    wait(page, "document.querySelector('play-ground pre').textContent.length > 8", 120)
    begun = page.locator("play-ground pre").text_content()
    assert page.locator("play-ground button", has_text="Stop").is_enabled()
    while not held_ends:
        page.wait_for_timeout(20)
    sink, delta = held_ends.pop()
    sink(delta)
    wait(page, "document.querySelector('play-ground pre').textContent.includes('prompt tokens')", 120)
    text = page.locator("play-ground pre").text_content()
    assert text.startswith(begun)
    answer = text.split("\n\n—")[0].strip()
    if kind == "required":
        assert answer.startswith("→ get_weather ")
        answer = answer.removeprefix("→ get_weather ").split("\n")[0]
    assert set(json.loads(answer)) <= {"name", "age", "city", "days"}
    assert re.search(r"[1-9]\d* forced$", text)
    assert page.locator("play-ground button", has_text="Stop").is_disabled()


def test_a_schema_that_is_none_is_told_and_nothing_is_lost(page_of):
    page = page_of()
    page.locator("[name=kind]").select_option("schema")
    page.locator("[name=form]").fill("{")
    page.locator("play-ground button", has_text="Send").click()
    page.locator("play-ground pre.error").wait_for()
    assert "not JSON" in page.locator("play-ground pre").text_content()
    assert page.locator("[name=form]").input_value() == "{"


def test_focus_and_open_reports_outlive_what_is_refreshed(page_of, model_server, asked):
    page = page_of()
    summary = page.locator("program-book summary", has_text="keeper")
    summary.focus()
    page.keyboard.press("Enter")
    page.locator("program-book details[open] tbody tr").first.wait_for()
    with model_server.client(headers={"X-Agentrt-Program": "another"}) as http:
        http.post("/v1/completions", json={"prompt": "One", "max_tokens": 1})
    page.locator("program-book summary", has_text="another").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "keeper"
    assert page.locator("program-book details[open]").count() == 1


def contrast(page, selector):
    """WCAG contrast of a text against the nearest background that is painted."""
    return page.evaluate("""selector => {
        const node = document.querySelector(selector);
        const channels = (text) => text.match(/[\\d.]+/g).map(Number);
        const light = (text) => channels(text).slice(0, 3).map((value) => value / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)).reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
        let under = node;
        while (under && (channels(getComputedStyle(under).backgroundColor)[3] ?? 1) === 0) under = under.parentElement;
        const [a, b] = [light(getComputedStyle(node).color), light(getComputedStyle(under).backgroundColor)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    }""", selector)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_fits_a_phone_and_is_readable_in_both_themes(page_of, asked, width, scheme):
    page = page_of(width, scheme)
    page.locator("prefix-tree .path").first.wait_for()
    page.locator("program-book summary", has_text="keeper").click()
    page.locator("program-book details[open] tbody tr").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in ("h1", "h1 span", "#status", ".tile .label", ".tile .value", ".tile .note", ".hint", ".path", ".numbers", "th", "td", "label", "summary", "button.main", "play-ground pre", "program-book details[open] a"):
        assert contrast(page, selector) >= 4.5, (selector, contrast(page, selector))
    small = page.evaluate("""() => [...document.querySelectorAll("button, summary, select, input, a:not(.skip)")]
        .filter(control => control.checkVisibility() && control.getBoundingClientRect().height < 20).map(control => control.textContent)""")
    assert small == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(247, 247, 244)"
    assert dark == (scheme == "dark")
