"""The page in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .served import SCRIPT, Played, Relay, playing, small_model, wait_for
from .test_rounds_of_streams import rounds_of

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

AXE = Path(__file__).parents[3] / "build" / "page" / "node_modules" / "axe-core" / "axe.min.js"
KEY, BOSS = "secret", "boss"
WATCH = "window.violations = []; addEventListener('securitypolicyviolation', (e) => violations.push(e.blockedURI))"
PROMPT = "abcabcabc abcabc"
EXPECTED = ("400", "401", "403", "429", "ERR_")  # of failures that a test causes


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    """The model writes parts of tags, and has a tag for a name."""
    with playing(
        small_model(2048, tags=True), api_key=(KEY,), operator_key=BOSS, served_model_name=(SCRIPT,)
    ) as running:
        running.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page, and what went wrong in it."""

    def __init__(self, browser: Any, url: str, *, path: str = "", key: str | None = KEY, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(30_000)
        self.context.add_init_script(WATCH)
        if key is not None:
            self.context.add_init_script(f"sessionStorage.setItem('paceline.key', {json.dumps(key)})")
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._log)
        self.page.goto(url + path)
        if key is not None:
            self.page.wait_for_selector("#method option:nth-child(3)", state="attached")

    def _log(self, message: Any) -> None:
        if message.type == "error" and not any(word in message.text for word in EXPECTED):
            self.problems.append(message.text)

    def write(self, prompt: str = PROMPT, wait: bool = True, **fields: Any) -> None:
        """Write a text from the form."""
        page = self.page
        page.evaluate("for (const part of document.querySelectorAll('#ask > details')) part.open = true")
        for name, value in {"seed": 7, "max_tokens": 40, "temperature": 0.3, **fields}.items():
            page.fill(f"#{name}", str(value))
        page.fill("#prompt", prompt)
        page.click("#go")
        if wait:
            self.ended()

    def mode(self, value: str) -> None:
        self.page.check(f"input[value={value}]")

    def ended(self) -> None:
        self.until("document.querySelector('#stop-writing').disabled && !document.querySelector('#plain-part').hidden")

    def until(self, condition: str) -> None:
        """Wait until an expression is true. `wait_for_function` needs eval, which the policy of the page refuses."""
        for _ in range(3000):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(10)
        raise AssertionError(f"it did not happen in time: {condition}")

    def texts(self) -> list[str]:
        found: list[str] = self.page.eval_on_selector_all(
            "#ribbon .token", "all => all.map((each) => each.textContent)"
        )
        return found

    def badges(self) -> list[str]:
        found: list[str] = self.page.eval_on_selector_all("#runs .badge", "all => all.map((each) => each.textContent)")
        return found

    def check(self) -> None:
        assert self.problems == []
        assert self.page.evaluate("violations") == []

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def tab(browser: Any, played: Played) -> Iterator[Tab]:
    tab = Tab(browser, played.url, viewport={"width": 1280, "height": 800})
    yield tab
    tab.check()
    tab.close()


def body(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "seed": 7, "max_tokens": 40, "temperature": 0.3, **more}


def chat(*messages: str, **more: Any) -> dict[str, Any]:
    roles = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
    return {"messages": roles, "seed": 7, "max_tokens": 40, "temperature": 0.3, **more}


# ---- the text and its colours


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_text_and_the_colours_are_those_of_the_api(tab: Tab, played: Played, mode: str) -> None:
    tab.mode(mode)
    tab.write()
    path, asked = ("/v1/completions", body()) if mode == "completion" else ("/v1/chat/completions", chat(PROMPT))
    choice = played.post(path, asked).json()["choices"][0]
    text = choice["text"] if mode == "completion" else choice["message"]["content"]
    assert "".join(tab.texts()) == text
    assert tab.page.text_content("#plain") == text
    rounds = rounds_of(played.stream(path, {**asked, "stream_options": {"include_rounds": True}}))
    kinds = tab.page.eval_on_selector_all(
        "#ribbon .round",
        "all => all.map((each) => [...each.querySelectorAll('.token')].map((one) => one.classList[1]))",
    )
    assert kinds == [["drafted"] * len(r["accepted"]) + ["own"] * (r["own"] is not None) for r in rounds]
    assert any("drafted" in kind for kind in kinds)
    ghosts = tab.page.eval_on_selector_all(
        "#ribbon .round", "all => all.map((each) => each.querySelectorAll('.ghost').length)"
    )
    assert ghosts == [int(len(r["drafted"]) > len(r["accepted"])) for r in rounds]  # a chain fails at one place


def test_markup_of_a_prompt_a_model_and_a_name_stays_text(tab: Tab) -> None:
    tab.write(SCRIPT, system=SCRIPT, temperature=1)
    page = tab.page
    assert SCRIPT in page.text_content("#server")
    assert SCRIPT in page.text_content("#conversation")
    assert "</script>" in page.text_content("#ribbon")
    assert "<img src=x" in page.text_content("#plain")
    page.hover("#ribbon .token >> nth=3")
    page.wait_for_selector("#details .shares")
    assert page.evaluate("document.title").startswith(SCRIPT)
    assert page.evaluate("document.querySelectorAll('main script, main img, header script').length") == 0


def test_a_token_shows_its_details_and_its_race(tab: Tab, played: Played) -> None:
    tab.mode("completion")
    tab.write()
    asked = body(stream_options={"include_rounds": True, "include_likeliest": 5})
    rounds = rounds_of(played.stream("/v1/completions", asked))
    at = next(
        index for index, each in enumerate(rounds) if len(each["accepted"]) < len(each["drafted"]) and each["own"]
    )
    tab.page.hover(f"#ribbon .round >> nth={at} >> .own")
    tab.until("document.querySelectorAll('#details ol.shares').length == 2")
    details = tab.page.inner_text("#details")
    assert f"{at + 1} of {len(rounds)}" in details
    assert "prompt-lookup" in details
    assert f"{len(rounds[at]['drafted'])}, accepted {len(rounds[at]['accepted'])}" in details
    assert "The largest p / E wins" in details
    lists = tab.page.eval_on_selector_all("#details ol.shares", "all => all.map((each) => each.children.length)")
    assert lists == [len(rounds[at]["likeliest"][-1])] * 2
    kept = tab.page.eval_on_selector_all("#details .draft li", "all => all.map((each) => each.className)")
    assert kept == ["kept" if node in rounds[at]["accepted"] else "lost" for node in range(len(rounds[at]["drafted"]))]


# ---- the same dice


def test_no_drafter_changes_a_letter(tab: Tab) -> None:
    tab.mode("completion")
    tab.write()
    page, before = tab.page, "".join(tab.texts())
    page.click("#no-drafter")
    tab.until("document.querySelectorAll('#runs .badge.same').length == 1")
    assert ("".join(tab.texts()), page.locator("#ribbon .drafted").count()) == (before, 0)
    page.click("#worst-drafter")
    tab.until("document.querySelectorAll('#runs .badge.same').length == 2")
    assert "".join(tab.texts()) == before
    assert page.locator("#ribbon .ghost").count() > 10
    for at, (method, gamma, tree) in enumerate(
        (("suffix", 2, False), ("ngram", 9, True), ("prompt-lookup", 3, True)), 3
    ):
        page.select_option("#other-method", method)
        page.fill("#other-gamma", str(gamma))
        page.set_checked("#other-tree", tree)
        page.click("#other-drafter")
        tab.until(f"document.querySelectorAll('#runs .badge.same').length == {at}")
        assert "".join(tab.texts()) == before
    assert tab.badges() == ["the first", *["identical, byte for byte"] * 5]
    assert "identical, byte for byte" in page.text_content("#verdict")
    page.click("#runs tbody tr:first-child button")
    tab.until("document.querySelector('#ribbon .drafted') !== null")
    assert "".join(tab.texts()) == before


def test_a_tree_has_its_rejected_branches_above_the_tokens_that_were_written_instead(tab: Tab, played: Played) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 6, "tree": True}
    tab.mode("completion")
    tab.page.evaluate("document.querySelector('#speculation').open = true")
    tab.page.select_option("#method", "ngram")
    tab.page.fill("#gamma", "6")
    tab.page.check("#tree")
    tab.write(max_tokens=120)
    asked = body(max_tokens=120, speculative_config=config, stream_options={"include_rounds": True})
    expected = list[int]()
    for each in rounds_of(played.stream("/v1/completions", asked)):
        path = [*each["accepted"], None][: len(each["accepted"]) + (each["own"] is not None)]
        parents = each["parents"] or range(-1, len(each["drafted"]) - 1)
        for above, node in zip([-1, *each["accepted"]], path, strict=False):
            expected.append(sum(parent == above and at != node for at, parent in enumerate(parents)))
    shown = tab.page.eval_on_selector_all(
        "#ribbon .token",
        "all => all.map((each) => each.parentElement.querySelectorAll(':scope > .ghosts > .ghost').length)",
    )
    assert shown == [min(3, count) for count in expected]
    assert max(expected) > 1


def test_the_badge_compares_texts_and_tokens(tab: Tab) -> None:
    """One letter, one token or an end too early: the badge does not say identical."""
    digest = tab.page.get_attribute("script", "src").split("/")[2]
    found = tab.page.evaluate(
        """async (path) => {
            const { compare } = await import(path);
            const rounds = (own) => [{ drafted: [1, 2], accepted: [0], own }];
            const run = (more) => ({ status: 'done', text: 'abc', rounds: rounds(3), ...more });
            const others = [{}, { text: 'abd' }, { text: 'abc ' }, { rounds: rounds(4) }, { status: 'cancelled' }];
            return others.map((more) => compare(run(more), run({})).kind);
        }""",
        f"/page/{digest}/experiments.js",
    )
    assert found == ["same", "other", "other", "other", "open"]


def test_the_race_and_the_replay(tab: Tab) -> None:
    tab.mode("completion")
    tab.write()
    page = tab.page
    page.click("#race")
    page.wait_for_selector("#race-part svg")
    told = page.text_content("#race-text")
    assert "one after the other" in told
    assert "τ/(v+γc) = " in told
    assert "byte for byte" in told
    assert page.locator("#race-chart path.line").count() == 4  # two stairs and two lines of the legend
    assert page.locator("#time-chart rect.forward").count() > 5
    page.select_option("#if-method", "suffix")
    tab.until("document.querySelector('#if-text').textContent.startsWith('Exactly')")
    page.select_option("#if-method", "recycling")
    tab.until("document.querySelector('#if-text').textContent.startsWith('Unknown')")
    assert "logits" in page.text_content("#if-text")


# ---- writing and stopping


def test_escape_cancels_and_the_slot_is_free(tab: Tab, played: Played) -> None:
    tab.mode("completion")
    with played.turns:
        tab.write(wait=False, max_tokens=1900)
        engine = played.service.engine
        wait_for(lambda: engine.state().running + engine.state().reading + engine.state().waiting == 1)
    tab.page.wait_for_selector("#ribbon .token")
    tab.page.keyboard.press("Escape")
    tab.ended()
    assert "Stopped after" in tab.page.text_content("#status")
    wait_for(lambda: engine.state().running + engine.state().reading + engine.state().waiting == 0)
    assert len(tab.texts()) < 1900


def test_an_edited_message_continues_from_the_cache(tab: Tab, played: Played) -> None:
    tab.write("abc def ghi jkl mno pqr stu vwx")
    tab.write("and more of it")
    tab.page.click("#conversation li >> nth=2 >> button")
    assert tab.page.input_value("#prompt") == "and more of it"
    tab.write("another end")
    figures = tab.page.text_content("#figures")
    cached, total = (
        int(word) for word in figures.split("cached ")[1].replace(" tokens of the prompt", "").split(" of ")
    )
    assert 30 < cached < total
    first = tab.page.text_content("#conversation li:nth-child(2) p")
    asked = chat("abc def ghi jkl mno pqr stu vwx", first, "another end")
    assert "".join(tab.texts()) == played.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]


def test_a_link_holds_the_prompt_the_settings_and_the_seed(tab: Tab, browser: Any, played: Played) -> None:
    tab.mode("completion")
    tab.write("Grüße, abc", seed=123, temperature=0.5, stop="zz\nyy", top_k=7)
    fragment = tab.page.evaluate("location.hash")
    other = Tab(browser, played.url, path="/" + fragment)
    for name, value in {
        "prompt": "Grüße, abc",
        "seed": "123",
        "temperature": "0.5",
        "stop": "zz\nyy",
        "top_k": "7",
    }.items():
        assert other.page.input_value(f"#{name}") == value
    other.page.click("#go")
    other.ended()
    assert other.texts() == tab.texts()
    other.check()
    other.close()
    broken = Tab(browser, played.url, path="/#%7B%22mode%22" + "x" * 50)
    assert broken.page.input_value("#prompt") == ""
    broken.check()
    broken.close()


def test_a_request_can_be_copied(tab: Tab, played: Played) -> None:
    tab.mode("completion")
    tab.write("it's abc", temperature=0.5)
    for name, words in {"curl": ["/v1/completions", "it'\\''s abc", "$PACELINE_API_KEY"],
                        "python": ["OpenAI(", 'prompt="it\'s abc"', "seed=7", "temperature=0.5"]}.items():  # fmt: skip
        tab.page.click(f"#copy-{name}")
        text = tab.page.input_value("#copy-text")
        assert [word for word in words if word not in text] == [], text
        assert KEY not in text
        if name == "python":
            compile(text, "copied", "exec")
        tab.page.keyboard.press("Escape")


def test_what_cannot_be_sent_is_named_at_its_field(tab: Tab) -> None:
    tab.write("", wait=False)
    assert "empty" in tab.page.text_content("#problem")
    tab.page.fill("#logit_bias", "{")
    tab.page.fill("#prompt", "a")
    tab.page.click("#go")
    assert "Logit bias is not valid JSON" in tab.page.text_content("#problem")
    assert tab.page.evaluate("document.activeElement.id") == "logit_bias"
    tab.page.fill("#logit_bias", "")
    tab.page.fill("#max_tokens", "100000")
    tab.page.click("#go")
    tab.until("document.querySelector('#problem').textContent.includes('context of this server')")


def test_the_page_asks_for_the_key(browser: Any, played: Played) -> None:
    tab = Tab(browser, played.url, key=None)
    tab.page.wait_for_selector("#key-dialog[open]")
    tab.page.fill("#key", KEY)
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("#method option:nth-child(3)", state="attached")
    assert tab.page.evaluate(
        "[sessionStorage.length, Object.keys(localStorage).some((name) => name.includes('key'))]"
    ) == [1, False]
    tab.check()
    tab.close()


def test_two_tabs_write_at_once(browser: Any, played: Played) -> None:
    with ExitStack() as stack:
        tabs = [Tab(browser, played.url) for _ in range(2)]
        for tab in tabs:
            stack.callback(tab.close)
            tab.mode("completion")
        for seed, tab in enumerate(tabs):
            tab.write(wait=False, seed=seed, max_tokens=300)
        for seed, tab in enumerate(tabs):
            tab.ended()
            text = played.post("/v1/completions", body(seed=seed, max_tokens=300)).json()["choices"][0]["text"]
            assert "".join(tab.texts()) == text
            tab.check()


def test_a_server_that_restarts_is_named_and_the_text_can_be_written_again(browser: Any) -> None:
    model, relay = small_model(), Relay()
    with playing(model) as first:
        relay.target = port_of(first)
        tab = Tab(browser, relay.url)
        tab.mode("completion")
        with first.turns:
            tab.write(wait=False, max_tokens=60)
            state = first.service.engine.state
            wait_for(lambda: state().running + state().reading + state().waiting == 1)
            relay.cut()
            tab.page.wait_for_selector("#retry:not([hidden])")
        assert "the same seed gives the same text" in tab.page.text_content("#problem-text")
    tab.page.click("#retry")
    tab.until("document.querySelector('#problem-text').textContent.includes('cannot be reached')")
    with playing(model) as second:
        relay.target = port_of(second)
        tab.page.click("#retry")
        tab.until("document.querySelectorAll('#ribbon .token').length == 60")
        tab.ended()
        assert "".join(tab.texts()) == second.post("/v1/completions", body(max_tokens=60)).json()["choices"][0]["text"]
        tab.check()
        tab.close()
        relay.close()


def port_of(played: Played) -> int:
    return int(played.url.rpartition(":")[2])


# ---- the operator


def test_the_operator_sees_slots_and_gauges(browser: Any, played: Played) -> None:
    tab = Tab(browser, played.url)
    page = tab.page
    page.click("#view-operator")
    tab.until("document.querySelector('#problem').textContent.includes(\"operator's key\")")
    page.fill("#operator-key", BOSS)
    page.click("#operator-form button")
    tab.until("document.querySelectorAll('#gauges dd').length >= 7")
    wait_for(lambda: bool(played.service.events._readers))
    played.post("/v1/completions", body(PROMPT * 4))
    page.wait_for_selector("#lanes rect.piece", state="attached")
    page.wait_for_selector("#lanes rect.drafter-0", state="attached")
    assert "prompt-lookup" in page.inner_text("#acceptance")
    tab.check()
    tab.close()


# ---- for everyone


def test_a_keyboard_is_enough(tab: Tab) -> None:
    page = tab.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.keyboard.type("abcabc")
    page.keyboard.press("Control+Enter")
    tab.ended()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "ribbon":
            break
    assert page.evaluate("document.activeElement.id") == "ribbon"
    selected = "document.querySelector('#ribbon [aria-selected=true]')"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(f"{selected}.dataset.at") == "0"
    assert page.get_attribute("#ribbon", "aria-activedescendant") == page.evaluate(f"{selected}.id")
    page.wait_for_selector("#details dl")
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.querySelectorAll('#ribbon .round')[1].querySelector('.token').dataset.at")
    assert page.evaluate(f"{selected}.dataset.at") == second
    page.keyboard.press("End")
    assert page.evaluate(f"{selected}.dataset.at") == str(len(tab.texts()) - 1)
    page.keyboard.press("Home")
    assert page.evaluate(f"{selected}.dataset.at") == "0"


@pytest.mark.parametrize("operating", [False, True])
def test_a_phone_shows_everything_without_scrolling_sideways(browser: Any, played: Played, operating: bool) -> None:
    tab = Tab(browser, played.url, viewport={"width": 360, "height": 740}, has_touch=True)
    if operating:
        tab.page.click("#view-operator")
        tab.page.fill("#operator-key", BOSS)
        tab.page.click("#operator-form button")
        tab.page.wait_for_selector("#lanes svg")
    else:
        tab.write()
        tab.page.click("#race")
        tab.page.wait_for_selector("#race-part svg")
    wide = """[...document.querySelectorAll('body *')]
        .filter((each) => each.checkVisibility() && each.getBoundingClientRect().right > 361)
        .filter((each) => !each.closest('.scroll, .hidden-text, .skip, #ribbon, svg'))
        .map((each) => each.id || each.className || each.tagName)"""
    assert tab.page.evaluate(wide) == []
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    tab.check()
    tab.close()


def test_tokens_are_not_announced_one_by_one(tab: Tab) -> None:
    """The text is in no live region; the status speaks at the begin and at the end."""
    tab.page.evaluate(
        "window.spoken = []; new MutationObserver(() => spoken.push(document.querySelector('#status').textContent))"
        ".observe(document.querySelector('#status'), { childList: true, subtree: true, characterData: true })"
    )
    tab.write(max_tokens=200)
    assert tab.page.evaluate("document.querySelector('#ribbon').closest('[aria-live]')") is None
    spoken = tab.page.evaluate("spoken")
    assert spoken[0] == "Writing."
    assert spoken[-1].startswith("Done: 200 tokens")
    assert len(spoken) == 2


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not fetched (make pagetools)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, played: Played, scheme: str) -> None:
    tab = Tab(browser, played.url, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True,
              viewport={"width": 1280, "height": 800})  # fmt: skip
    tab.write()
    tab.page.click("#race")
    tab.page.wait_for_selector("#race-part svg")
    tab.page.click("#runs tbody tr:first-child button")
    tab.until("document.querySelector('#runs tbody tr:first-child').className == 'shown'")
    tab.page.hover("#ribbon .own >> nth=2")
    tab.page.wait_for_selector("#details .shares")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == scheme
    tab.page.evaluate(AXE.read_text("utf-8"))
    for view in ("write", "operator"):
        tab.page.click(f"#view-{view}")
        found = tab.page.evaluate("axe.run(document)")["violations"]
        serious = {
            each["id"]: [node["html"][:160] for node in each["nodes"]]
            for each in found if each["impact"] in ("serious", "critical")
        }  # fmt: skip
        assert serious == {}
    tab.close()
