"""Chat page in a real browser. Skipped without a browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jaxspec
from tests import tiny_photo
from tests.serving.conftest import Live
from tests.serving.scripted import LENGTHS
from tests.serving.test_images import part, serve, url, user
from tests.text.chat.models import QWEN

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = (1280, 800), (390, 844)
MARKUP = (
    "<img src=x onerror=\"document.title='broken'\"><b>bold</b> & <script>document.title=1</script>"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        # As root, as in a container, Chromium has no sandbox.
        args = ["--no-sandbox"] if os.geteuid() == 0 else []
        try:
            started = playwright.chromium.launch(executable_path=path, args=args)
        except sync_api.Error as error:
            pytest.skip(f"no browser starts here: {str(error).splitlines()[0]}")
        yield started
        started.close()


Open = Callable[..., Any]


@pytest.fixture
def look(browser: Any) -> Iterator[Open]:
    """Open the page of a server. Its logs and requests are checked at the end."""
    contexts, wrong = [], []

    def look(live: Live, size: tuple[int, int] = DESKTOP, allowed: str = "401") -> Any:
        home = str(live.client.base_url)
        context = browser.new_context(viewport={"width": size[0], "height": size[1]})
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: (
                wrong.append(message.text)
                if message.type in ("error", "warning") and allowed not in message.text
                else None
            ),
        )
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((home, "data:")) else wrong.append(asked.url)
            ),
        )
        page.goto(home)
        return page

    yield look
    for context in contexts:
        context.close()
    assert wrong == []


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def done(page: Any) -> None:
    expect(page.locator("#told")).to_contain_text("Reply done")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_markup_is_text_and_accepted_drafts_are_coloured(scripted: Any, look: Open) -> None:
    """Text is shown letter by letter; a step's drafts are marked, its last token is not."""
    live, _ = scripted(f"Look: {MARKUP} of the class and the name")
    page = look(live)
    ask(page, MARKUP)
    done(page)
    asked, reply = page.locator("article").all()
    assert asked.locator(".text").inner_text() == MARKUP
    shown = reply.locator(".text").last
    assert shown.inner_text() == f"Look: {MARKUP} of the class and the name"
    assert page.locator("#messages :is(img, b, script)").count() == 0
    assert page.title() == "scripted · jaxspec"
    steps = shown.locator(".step").all()
    marks = [[word.get_attribute("class") for word in step.locator("span").all()] for step in steps]
    assert marks[:4] == [["own"], ["draft"] * 3 + ["own"], ["own"], ["draft"] * 2 + ["own"]]
    assert steps[1].get_attribute("title") == "Step 2: 3 of 3 drafts accepted"
    colours = {
        word.evaluate("e => getComputedStyle(e).backgroundColor")
        for word in steps[1].locator("span").all()
    }
    assert len(colours) == 4  # three positions, and none
    page.get_by_label("Colour accepted drafts").uncheck()
    plain = steps[1].locator("span").first
    assert plain.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"


TAKE = """(target, [data, kind]) => {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "photo.png", { type: "image/png" }));
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
        : new DragEvent("drop", { ...options, dataTransfer: transfer });
    target.dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def with_vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    pytest.importorskip("PIL", reason="images need Pillow")
    target = tiny_photo.write_target(tmp_path_factory.mktemp("photo") / "target")
    for live in serve(jaxspec.load(str(target))):
        for parts in ([part(url())] * 2, ["the c"]):  # the page waits for no compiler
            live.post("/v1/chat/completions", messages=[user(*parts, "a b")], max_tokens=4)
        yield live


def test_images_are_pasted_and_dropped_and_shown(with_vision: Live, look: Open) -> None:
    page = look(with_vision)
    data = base64.b64encode(tiny_photo.png()).decode()
    waiting = page.get_by_role("group", name="Images of the message")
    assert not waiting.is_visible()
    for kind in ("paste", "drop", "drop"):
        page.locator("#prompt").evaluate(TAKE, [data, kind])
    expect(waiting.locator("img")).to_have_count(3)
    waiting.locator("button").first.click()
    expect(waiting.locator("img")).to_have_count(2)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "a b")
    done(page)
    (message,) = sent.value.post_data_json["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    sent_url = message["content"][0]["image_url"]["url"]
    assert sent_url == f"data:image/png;base64,{data}"
    assert not waiting.is_visible()
    shown = page.locator("article.user img")
    assert shown.count() == 2
    assert shown.first.evaluate("image => image.naturalWidth") == 30
    page.get_by_role("button", name="New chat").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "the c")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "the c"}]
    done(page)


def test_an_image_that_is_refused_waits_for_another_try(live: Live, look: Open) -> None:
    """The server of this model reads text alone, and says so."""
    pytest.importorskip("PIL", reason="images need Pillow")
    page = look(live, allowed="400")
    page.locator("#prompt").evaluate(TAKE, [base64.b64encode(tiny_photo.png()).decode(), "paste"])
    waiting = page.get_by_role("group", name="Images of the message")
    expect(waiting.locator("img")).to_have_count(1)
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".end.wrong")).to_contain_text("the target reads text alone")
    expect(waiting.locator("img")).to_have_count(1)
    page.get_by_role("button", name="New chat").click()
    assert not waiting.is_visible()


def test_the_live_picture(scripted: Any, look: Open) -> None:
    """A bar for each position, of the share of steps whose draft there was accepted."""
    live, engine = scripted("of the class and the name " * 8)
    page = look(live)
    ask(page, "a")
    done(page)
    count = len(engine.replies[0])
    lengths, left = [], count - 1
    while left > 0:
        lengths.append(min(LENGTHS[len(lengths) % 4], left))
        left -= lengths[-1]
    assert page.locator("#positions rect").count() == 3
    label = page.locator("#positions").get_attribute("aria-label")
    share = sum(length > 1 for length in lengths) / len(lengths)
    assert f"position 1: {round(100 * share)} %" in label
    assert f"{count} tokens in {len(lengths)} steps" in page.locator(".end").inner_text()
    assert float(page.locator("#per-step").inner_text()) == pytest.approx(2.5, abs=0.1)


def test_thinking_is_folded_and_a_tool_s_answer_goes_back(scripted: Any, look: Open) -> None:
    call = QWEN.call("weather", {"city": "<b>Oslo</b>"})
    live, engine = scripted(QWEN.thought("I look outside.") + "Let me see." + call, "Rain.")
    page = look(live)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools, as a JSON list").fill("{")
    page.get_by_role("button", name="Save").click()
    assert page.locator("#settings").is_visible()  # that is no JSON
    page.get_by_label("Tools, as a JSON list").fill(json.dumps(TOOLS))
    page.get_by_role("button", name="Save").click()
    ask(page, "Weather?")
    done(page)
    thought = page.locator(".thinking .text")
    assert not thought.is_visible()
    page.get_by_text("Thinking", exact=True).click()
    assert thought.inner_text() == "I look outside."
    assert page.locator(".model > .text").inner_text() == "Let me see."
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "<b>Oslo</b>"}
    page.get_by_label("What weather says").fill("wet")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".model .text").last).to_have_text("Rain.")
    decode = live.serving_model.tokenizer.decode
    first, second = (decode(request.prompt_ids) for request in engine.asked)
    assert "1 tools" in first
    assert "wet" in second
    assert "Let me see." in second


def test_a_reply_is_stopped(scripted: Any, look: Open) -> None:
    """The button and Escape free the slot, keep the text, and allow the next prompt."""
    live, engine = scripted("and the name " * 30)
    page = look(live)
    for stop in (
        lambda: page.get_by_role("button", name="Stop").click(),
        lambda: page.keyboard.press("Escape"),
    ):
        engine.gate.clear()
        ask(page, "a")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        assert page.locator("#messages").get_attribute("aria-busy") == "true"
        stop()
        expect(page.locator(".end").last).to_have_text("Stopped.")
        engine.gate.set()
        live.settle()
    engine.gate.clear()
    ask(page, "ccc")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    engine.gate.set()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert page.locator("article").count() == 0
    ask(page, "b")
    done(page)
    prompt = live.serving_model.tokenizer.decode(engine.asked[-1].prompt_ids)
    assert prompt.startswith("user\nb")  # nothing is left of what was before


def test_settings_reach_the_engine(scripted: Any, look: Open) -> None:
    live, engine = scripted("and the name " * 30)
    page = look(live)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Most new tokens").fill("7")
    page.get_by_label("Seed").fill("11")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("System message").fill("be brief")
    page.get_by_role("button", name="Save").click()
    page.reload()  # they stay
    ask(page, "a")
    done(page)
    (request,) = engine.asked
    assert (request.sampling.temperature, request.max_new_tokens, request.seed) == (0.25, 7, 11)
    prompt = live.serving_model.tokenizer.decode(request.prompt_ids)
    assert "system\nbe brief" in prompt
    assert "thinking False" in prompt
    page.get_by_label("Continue a text").check()
    ask(page, "the ")
    done(page)
    assert live.serving_model.tokenizer.decode(engine.asked[1].prompt_ids) == "the "


def test_it_asks_for_the_key(scripted: Any, look: Open) -> None:
    live, _ = scripted("Yes.", api_key=("secret",))
    page = look(live)
    field = page.get_by_label("API key")
    for key in ("wrong", "secret"):
        expect(field).to_be_visible()
        field.fill(key)
        page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("scripted")
    expect(field).not_to_be_visible()
    ask(page, "a")
    done(page)
    assert "secret" not in page.content()


def test_an_error_is_shown_and_the_prompt_kept(scripted: Any, look: Open) -> None:
    live, engine = scripted("Yes.")
    page = look(live, allowed="400")
    ask(page, "word " * 200)
    expect(page.locator(".end.wrong")).to_contain_text("this model has room for")
    assert page.get_by_label("Message", exact=True).input_value() == "word " * 200
    ask(page, "a")
    done(page)
    assert "word" not in live.serving_model.tokenizer.decode(engine.asked[0].prompt_ids)


def test_on_a_phone_and_by_keyboard(scripted: Any, look: Open) -> None:
    """Nothing is wider than the screen, the chart is folded, and Tab reaches all buttons."""
    live, _ = scripted("supercalifragilistic" * 20)
    page = look(live, PHONE)
    expect(page.locator("#model")).to_have_text("scripted")
    assert not page.locator("#positions").is_visible()
    ask(page, "a")
    done(page)
    for box in ("html", "#messages"):
        assert page.locator(box).evaluate("e => [e.scrollWidth, e.clientWidth]") == [PHONE[0]] * 2
    assert page.locator("html").evaluate("e => e.scrollHeight") == PHONE[1]
    page.keyboard.press("Tab")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"clear", "settings-open", "SUMMARY", "messages", "prompt", "send"} <= set(reached)
    page.locator("#live summary").press("Enter")
    assert page.locator("#positions").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    named = page.locator("button, input, select, textarea, svg").evaluate_all(
        "all => all.filter(e => !(e.textContent.trim() || e.labels?.length || e.ariaLabel)).length"
    )
    assert named == 0
