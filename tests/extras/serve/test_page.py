"""The server's page in a real browser: against a server with a script, and the real one.

The scripted one sends what a model rarely does: events cut into pieces, errors, hostile text.
"""

import json
import math
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
DRIVER = shutil.which("chromedriver")
pytest.importorskip("selenium", reason="pip install -r requirements-dev.txt")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not CHROMIUM or not DRIVER, reason="needs chromium and chromedriver")]

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from tests.extras.serve.serving import make_run, serving  # noqa: E402

ROOM = Path(__file__).parents[3] / "extras" / "serve"
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
          "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css"}
HOSTILE = ["<img src=x onerror=\"document.title='PWNED'\">", "<script>document.title='PWNED'",
           "</script>", "</span></div>", "&lt;b&gt;", "<style>*{display:none}</style>"]


def event(texts: list[str], offset: int = 0, reason: str | None = None, **about: list) -> bytes:
    """A server-sent event with these tokens, `offset` letters after the beginning. about: what is
    to be said otherwise of their logprobs, which make each of them a chance of 1/4."""
    told = {"tokens": texts, "token_logprobs": [math.log(0.25)] * len(texts),
            "top_logprobs": [{" other": math.log(0.5), text: math.log(0.25)} for text in texts],
            "text_offset": [offset + len("".join(texts[:i])) for i in range(len(texts))]} | about
    choice = {"index": 0, "text": "".join(texts), "logprobs": told, "finish_reason": reason}
    return data({"choices": [choice]})


def data(value: dict) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
FOREVER = object()


class Stub(ThreadingHTTPServer):
    """Serves the page, and answers a completion with `status` and `script`: bytes to send, events
    to wait for, and FOREVER for a stream that goes on until the browser hangs up."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests, self.keys, self.hung_up = [], [], threading.Event()
        self.answer()

    def answer(self, *script: object, status: int = 200) -> None:
        self.script, self.status = script, status
        self.requests.clear()
        self.hung_up.clear()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()

    def do_GET(self):
        path = ROOM / ("page.html" if self.path == "/" else self.path[1:])
        if self.path == "/v1/models":
            self.begin(200, "application/json")
            self.wfile.write(json.dumps({"data": [{"id": "<b>stub</b>"}]}).encode())
        elif path.parent == ROOM and path.name.startswith("page.") and path.is_file():
            self.begin(200, KINDS[path.suffix])
            self.wfile.write(path.read_bytes())
        else:
            self.begin(404, "text/plain")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        self.server.keys.append(self.headers["Authorization"])
        self.begin(self.server.status, "text/event-stream")
        try:
            for part in self.server.script:
                if isinstance(part, bytes):
                    self.wfile.write(part)
                elif part is not FOREVER:
                    part.wait(10)
                while part is FOREVER:
                    self.wfile.write(b": still here\n\n")
                    time.sleep(0.02)
        except OSError:
            self.server.hung_up.set()


# --------------------------------------------------------------------------------- the browser


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                 f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def stub():
    with Stub() as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        yield stub
        stub.shutdown()


class Page:
    """The page as somebody sees and uses it."""

    def __init__(self, driver, url: str):
        self.driver = driver
        driver.get(url)

    def __getitem__(self, id: str):
        return self.driver.find_element(By.ID, id)

    @property
    def text(self) -> str:
        return self["text"].get_attribute("textContent")

    @property
    def tokens(self) -> list:
        """Where each begins; one with a part of the next line has a second element."""
        return self.driver.find_elements(By.CSS_SELECTOR, ".token[role]")

    @property
    def texts(self) -> list[str]:
        return self.js("return [...document.querySelectorAll('.token')].map(t => t.textContent)")

    @property
    def focused(self):
        return self.driver.switch_to.active_element

    def js(self, code: str, *values):
        return self.driver.execute_script(code, *values)

    def until(self, what):
        return WebDriverWait(self.driver, 10, 0.02).until(lambda _: what())

    def press(self, *keys: str) -> None:
        self.focused.send_keys(*keys)

    def write(self, prompt: str = "", how: str | None = "ended") -> None:
        """Type the prompt and click; then wait for how it ends."""
        self["prompt"].clear()
        self["prompt"].send_keys(prompt)
        self.js("document.getElementById('how').textContent = '-'")  # nothing of the last time
        self["write"].click()
        if how is not None:
            self.until(lambda: self["how"].text == how)

    def rows(self) -> list[list[str]]:
        """The open table: what, and percent."""
        return self.js("return [...document.querySelectorAll('#rows tr')].map(row => ["
                       "row.querySelector('th').textContent, row.lastChild.textContent])")

    def set(self, name: str, value: str | float) -> None:
        self.js("const field = document.querySelector(`[name=${arguments[0]}]`);"
                "field.value = arguments[1];"
                "field.dispatchEvent(new Event('input', {bubbles: true}))", name, value)


@pytest.fixture
def page(driver, stub):
    page = Page(driver, stub.url)
    yield page
    wrong = [entry["message"] for entry in driver.get_log("browser")
             if "v1/completions" not in entry["message"]]  # the refusals that the tests ask for
    assert wrong == []  # no error of a script, and nothing that the policy forbids


# ------------------------------------------------------------------------------------- writing


def test_text_comes_in_while_it_is_written(page, stub):
    more = threading.Event()
    stub.answer(event(["n", "ce"]), more, event([" upon"], 3, "length"), DONE)
    page.write("O", how="writing")
    assert page.text == "Once" and page["stop"].is_enabled() and not page["go_on"].is_enabled()
    more.set()
    page.until(lambda: page["how"].text == "limit reached")
    assert page.text == "Once upon" and not page["stop"].is_enabled()
    assert page["begin"].text == "O" and page.texts == ["n", "ce", " upon"]
    assert page["count"].text.startswith("3 tokens · ") and "/s" in page["count"].text
    assert page["model"].text == "<b>stub</b>"


CUT = """
const [bytes, size] = [Uint8Array.from(arguments[0]), arguments[1]];
window.fetch = async () => new Response(new ReadableStream({ start(out) {
  for (let i = 0; i < bytes.length; i += size) out.enqueue(bytes.slice(i, i + size));
  out.close();
} }));
"""


@pytest.mark.parametrize("ends", (b"\n", b"\r\n"), ids=("lf", "crlf"))
def test_the_network_may_cut_events_anywhere(page, ends):
    stream = b": a comment\n\n" + event(["é", "🌳 ", "a\n\nb"]) + event(["data: x"], 7, "stop")
    for size in 1, 2, 3, 7, 50, 100_000:
        page.js(CUT, list((stream + DONE).replace(b"\n", ends)), size)
        page.write("")
        assert page.texts == ["é", "🌳 ", "a\n\n", "b", "data: x"] and len(page.tokens) == 4


def test_a_token_has_its_own_text(page, stub):
    """Bytes of half a character have none, and what may become a stop comes with a later event."""
    halves = event(["", "", "🌳é", "x"], text_offset=[0, 0, 0, 2])
    held = event(["", ""], text_offset=[3, 5])
    rest = event(["abcde"], text_offset=[6], tokens=["e"])
    stub.answer(halves, held, rest, event([""], text_offset=[8], reason="stop"), DONE)
    page.write("")
    assert page.texts == ["", "", "🌳é", "x", "ab", "c", "de", ""]
    assert all(token.size["width"] > 1 for token in page.tokens)  # something to click


def test_without_logprobs_it_is_text(page, stub):
    choice = {"index": 0, "text": "plain", "logprobs": None, "finish_reason": "stop"}
    stub.answer(data({"choices": [choice]}), data({"choices": [], "usage": {}}), DONE)
    page.write("")
    assert page.texts == ["plain"]
    page.tokens[0].click()
    assert page["about"].text == "The server did not say what else was considered."


def test_settings_reach_the_request(page, stub):
    stub.answer(event(["a"], 0, "stop"), DONE)
    page["new_seed"].click()
    chosen = {"temperature": 0.35, "top_k": 40, "top_p": 0.9, "max_tokens": 17, "seed": 4711,
              "min_p": 0.05, "repetition_penalty": 1.15}
    for name, value in chosen.items():
        page.set(name, value)
    page.set("stop", r"end\n\\n")
    page.write("Once")
    assert stub.requests == [chosen | {"stop": "end\n\\n", "prompt": "Once", "stream": True,
                                       "logprobs": 10}]
    shown = [output.get_attribute("textContent")
             for output in page.driver.find_elements(By.TAG_NAME, "output")]
    assert shown == ["0.35", "40", "0.9", "0.05", "1.15"]


def test_nothing_is_cut_off_unless_asked_for(page, stub):
    stub.answer(event(["a"], 0, "stop"), DONE)
    page.write("")
    asked = stub.requests[0]
    assert (asked["prompt"], asked["top_k"], asked["top_p"], asked["min_p"],
            asked["repetition_penalty"], "stop" in asked) == ("", 0, 1, 0, 1, False)


def test_each_time_a_new_seed_which_is_shown(page, stub):
    stub.answer(event(["a"], 0, "stop"), DONE)
    seed = page.driver.find_element(By.NAME, "seed")
    for _ in range(2):
        page.write("")
        assert seed.get_property("value") == str(stub.requests[-1]["seed"])
    page["new_seed"].click()
    page.write("")
    page.until(lambda: len(stub.requests) == 3)
    seeds = [asked["seed"] for asked in stub.requests]
    assert seeds[0] != seeds[1] == seeds[2]


def test_a_setting_that_cannot_be_is_not_sent(page, stub):
    stub.answer(event(["a"], 0, "stop"), DONE)
    for value in "", "0", "1.5":
        page.set("max_tokens", value)
        page.write("", how=None)
    page.set("max_tokens", 3)
    page.write("")
    assert [asked["max_tokens"] for asked in stub.requests] == [3]


@pytest.mark.parametrize("by", ("button", "escape"))
def test_stop_hangs_up_and_keeps_the_text(page, stub, by):
    stub.answer(event(["some", " text"]), FOREVER)
    page.write("", how="writing")
    page["stop"].click() if by == "button" else page.press(Keys.ESCAPE)
    assert stub.hung_up.wait(10)
    page.until(lambda: page["how"].text == "stopped")
    assert page.text == "some text" and not page["error"].is_displayed()


def test_writing_anew_ends_what_is_being_written(page, stub):
    stub.answer(event(["first"]), FOREVER)
    page.write("", how="writing")
    stub.script = event(["second"], 0, "stop"), DONE
    page.write("")
    assert page.text == "second" and stub.hung_up.wait(10)


def test_go_on_and_edit(page, stub):
    stub.answer(event(["two "], 0, "length"), DONE)
    page.write("one ", how="limit reached")
    stub.answer(event(["three"], 0, "stop"), DONE)
    page["go_on"].click()
    page.until(lambda: page.text == "one two three")
    assert stub.requests[0]["prompt"] == "one two "
    page.until(page["edit"].is_enabled)
    page["edit"].click()
    assert page["prompt"].get_property("value") == "one two three" and page.text == ""


@pytest.mark.parametrize("secure", (True, False))
def test_copy(page, stub, secure):
    stub.answer(event([" <b>\n", "🌳"], 0, "stop"), DONE)
    page.write("Once")
    if secure:
        page.driver.execute_cdp_cmd("Browser.grantPermissions", {
            "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    else:  # as in a page over http from another machine
        page.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page["copy"].click()
    page.until(lambda: page["copy"].text == "Copied")
    page["prompt"].clear()
    page["prompt"].send_keys(Keys.CONTROL, "v")
    page.until(lambda: page["prompt"].get_property("value") == "Once <b>\n🌳")


# ------------------------------------------------------------------------ what else there was


TOP = {" the": 0.5, "\n\t": 0.2, "42": 0.1, "bytes:\\xc3": 0.05, "<|endoftext|>": 0.0312,
       "\u200b\u202e": 0.0004}


def with_choices() -> bytes:
    return event(["A", " tree", "."], 0, "stop", top_logprobs=[
        {"A": 0.0}, {name: math.log(p) for name, p in TOP.items()}, {".": 0.0}],
        token_logprobs=[0.0, math.log(0.01), 0.0])


def test_a_token_shows_what_else_was_considered(page, stub):
    stub.answer(with_choices(), DONE)
    page.write("")
    assert not page["choices"].is_displayed()
    page.tokens[1].click()
    assert page["choices"].is_displayed()
    assert page.rows() == [
        ["␣the", "50 %"], ["⏎⇥", "20 %"], ["42", "10 %"], ["bytes:\\xc3", "5.0 %"],
        ["<|endoftext|>", "3.1 %"], ["␣tree", "1.0 %"], ["\\u200b\\u202e", "0.040 %"],
        ["all others", "11 %"]]
    widths = [bar.size["width"] for bar in page.driver.find_elements(By.CSS_SELECTOR, ".bar div")]
    assert widths[0] > 2 * widths[1] > 3 * widths[2] > 0
    rows = page.driver.find_elements(By.CSS_SELECTOR, "#rows tr")
    assert [row.get_attribute("class") for row in rows].index("took") == 5
    buttons = page["rows"].find_elements(By.TAG_NAME, "button")
    cannot = [not button.is_enabled() for button in buttons]
    assert cannot == [False, False, False, True, True, False, False]  # no prompt can say these
    page.press(Keys.ESCAPE)
    assert not page["choices"].is_displayed() and page.focused == page.tokens[1]
    page.tokens[0].click()
    assert page.rows() == [["A", "100 %"]]
    page["prompt"].click()
    assert not page["choices"].is_displayed()


def test_surprises_have_more_colour(page, stub):
    stub.answer(event(["a", "b", "c"], 0, "stop", token_logprobs=[0.0, -1.0, -9999.0]), DONE)
    page.write("")
    page["prompt"].click()
    colours = [token.value_of_css_property("background-color") for token in page.tokens]
    alphas = [float(colour.rstrip(")").split(",")[3]) for colour in colours]
    assert 0 == alphas[0] < alphas[1] < alphas[2] < 0.6


def test_another_token_instead(page, stub):
    stub.answer(with_choices(), DONE)
    page.write("See: ")
    page.tokens[1].click()
    stub.answer(event([" end"], 0, "length"), DONE)
    page["rows"].find_elements(By.TAG_NAME, "button")[1].click()
    page.until(lambda: page["how"].text == "limit reached")
    assert stub.requests[0]["prompt"] == "See: A\n\t"
    assert page.text == "See: A\n\t end" and len(page.tokens) == 3
    picked = page.driver.find_elements(By.CLASS_NAME, "picked")
    assert [span.get_attribute("textContent") for span in picked] == ["\n", "\t"]
    page.tokens[1].click()  # it is still known what it was chosen from
    assert page.rows()[0] == ["␣the", "50 %"]
    assert page.driver.find_element(By.CLASS_NAME, "took").text.split() == ["⏎⇥", "20", "%"]


def test_all_of_it_with_the_keyboard(page, stub):
    stub.answer(with_choices(), DONE)
    assert page.focused == page["prompt"]
    page.press("x", Keys.CONTROL + Keys.ENTER)
    page.until(lambda: page["how"].text == "ended")
    for _ in range(5):  # Write, Go on, Edit, Copy; all tokens are one stop
        page.press(Keys.TAB)
    assert page.focused == page.tokens[0]
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ENTER)
    assert page.focused.text == "␣tree"
    stub.answer(event(["!"], 0, "length"), DONE)
    page.press(Keys.SHIFT + Keys.TAB)
    page.press(Keys.NULL)
    page.press(Keys.ENTER)  # "42": what no prompt can say is passed over
    page.until(lambda: page.text == "xA42!")
    assert page.focused == page.tokens[1]
    page.press(Keys.HOME)
    assert page.focused == page.tokens[0]
    page.press(Keys.END)
    page.press(Keys.SPACE)
    assert page["choices"].is_displayed()


# --------------------------------------------------------------------------- the real server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("served") / "tiny")
    with serving(run, "--max_tokens=30000") as server:
        yield server


@pytest.fixture
def real(driver, server):
    page = Page(driver, server.url)
    page.until(lambda: page["model"].text == "tiny")
    return page


def test_it_shows_what_the_server_writes(real, server):
    real["new_seed"].click()
    for name, value in {"seed": 7, "max_tokens": 40, "temperature": 0.9, "top_k": 20}.items():
        real.set(name, value)
    real.write("Tree é", how="limit reached")
    same = server.post("/v1/completions", {
        "prompt": "Tree é", "seed": 7, "max_tokens": 40, "temperature": 0.9, "top_k": 20,
        "top_p": 1, "min_p": 0, "repetition_penalty": 1, "logprobs": 10})["choices"][0]
    assert real.text == "Tree é" + same["text"] and len(real.tokens) == 40
    about = same["logprobs"]
    for i in 0, 17, 39:
        real.js("arguments[0].click()", real.tokens[i])
        expected = about["top_logprobs"][i] | {about["tokens"][i]: about["token_logprobs"][i]}
        shown = [float(percent.removesuffix(" %")) / 100 for what, percent in real.rows()
                 if what != "all others" and "<" not in percent]
        likely = sorted((math.exp(p) for p in expected.values()), reverse=True)
        assert len(shown) > 1
        assert shown == pytest.approx([p for p in likely if p >= 1e-4], rel=0.05, abs=0.006)
    wrong = [entry for entry in real.driver.get_log("browser") if server.url in entry["message"]]
    assert wrong == []  # the server's policy forbids nothing that the page does


def test_it_goes_on_from_another_token(real, server):
    real["new_seed"].click()
    real.set("max_tokens", 12)
    real.set("temperature", 0)
    real.write("ab", how="limit reached")
    old = [token.get_attribute("textContent") for token in real.tokens]
    real.js("arguments[0].click()", real.tokens[5])
    buttons = real["rows"].find_elements(By.TAG_NAME, "button")
    other = next(button for button in buttons if button.text.isalnum() and button.text != old[5])
    begin = "ab" + "".join(old[:5]) + other.text
    other.click()
    real.until(lambda: real["how"].text == "limit reached")
    expected = server.post("/v1/completions", {"prompt": begin, "max_tokens": 12,
                                               "temperature": 0})["choices"][0]["text"]
    assert real.text == begin + expected and len(real.tokens) == 18


def test_a_stop_is_where_the_text_ends(real, server):
    real["new_seed"].click()
    real.set("max_tokens", 200)
    real.write("x", how="limit reached")
    whole = real.text
    stop = whole[60:62]
    real.set("stop", stop.replace("\\", "\\\\").replace("\n", "\\n"))
    real.write("x")
    assert real.text == whole[: whole.index(stop, 1)]


def test_the_server_is_stopped_in_the_middle(real, server):
    real.set("max_tokens", 30000)
    real.write("x", how="writing")
    real.js("arguments[0].click()", real["stop"])  # the page scrolls on while a driver would aim
    real.until(lambda: real["how"].text == "stopped" and server.get("/health")["running"] == 0)
    assert 0 < len(real.tokens) < 30000


def test_its_words_are_shown(real):
    real.set("max_tokens", 30001)
    real.write("", how="")
    assert real["error"].text == "max_tokens is 30001, at most 30000 here"


def test_its_policy_lets_no_other_script_run(real):
    real.driver.get_log("browser")
    for element, property in ("script", "textContent"), ("img", "src"):
        real.js("const made = document.createElement(arguments[0]);"
                "made.setAttribute('onerror', 'document.title = \"PWNED\"');"
                "made[arguments[1]] = 'document.title = \"PWNED\"';"
                "document.body.append(made)", element, property)
    real.until(lambda: real.js("return document.querySelector('img').complete"))
    assert real.driver.title == "bonsaiGPT"
    assert "Content Security Policy" in str(real.driver.get_log("browser"))


def test_a_server_with_a_key_can_be_used(driver, tmp_path):
    with serving(make_run(tmp_path / "tiny"), BONSAI_API_KEY="s3cret") as server:
        page = Page(driver, server.url)
        page.until(page["key"].is_displayed)
        assert page["error"].text == "no api key, or a wrong one" and page["model"].text == ""
        page["key"].send_keys("wrong", Keys.TAB)
        page.write("x", how="")
        page.until(page["error"].is_displayed)
        page["key"].clear()
        page["key"].send_keys("s3cret", Keys.TAB)
        page.until(lambda: page["model"].text == "tiny")
        assert not page["error"].is_displayed()
        page.set("max_tokens", 9)
        page.write("x", how="limit reached")
        assert len(page.tokens) == 9 and not page["error"].is_displayed()
    driver.get_log("browser")


# --------------------------------------------------------------------- what is wrong, or hostile


def test_a_refusal_is_told_and_costs_no_text(page, stub):
    stub.answer(event(["text"], 0, "stop"), DONE)
    page.write("my ")
    refusal = "the server is busy: 64 requests are waiting"
    stub.answer(json.dumps({"error": {"message": refusal}}).encode(), status=429)
    page.write("other", how="")
    assert page["error"].text == refusal and page.text == "my text"
    page.tokens[0].click()
    page["rows"].find_elements(By.TAG_NAME, "button")[0].click()
    page.until(lambda: len(stub.requests) == 2 and page["error"].is_displayed())
    assert page.text == "my text"
    stub.answer(b"<html>", status=502)
    page.write("", how="")
    page.until(lambda: page["error"].text == "The server says 502 Bad Gateway.")
    stub.answer(event(["!"], 0, "stop"), DONE)
    page.write("now")
    assert page.text == "now!" and not page["error"].is_displayed()


def test_a_stream_that_breaks_off_is_told(page, stub):
    stub.answer(event(["half"]))
    page.write("", how="broken off")
    assert page["error"].text == "The connection ended before the text did."
    stub.answer(event(["half"]), data({"error": {"message": "out of memory"}}))
    page.write("", how="broken off")
    assert page["error"].text == "out of memory" and page.text == "half"


def test_a_server_that_is_gone(driver):
    with Stub() as gone:
        thread = threading.Thread(target=gone.serve_forever)
        thread.start()
        page = Page(driver, gone.url)
        gone.shutdown()
        thread.join()
    page.write("", how="")
    page.until(page["error"].is_displayed)
    assert page["error"].text.startswith("The server does not answer.")
    assert page["write"].is_enabled() and not page["stop"].is_enabled()
    driver.get_log("browser")


def test_a_key_is_asked_for_and_sent(page, stub):
    assert not page["key"].is_displayed()
    stub.answer(json.dumps({"error": {"message": "no api key"}}).encode(), status=401)
    page.write("", how="")
    page.until(page["key"].is_displayed)
    page["key"].send_keys("s3cret")
    stub.answer(event(["a"], 0, "stop"), DONE)
    page.write("")
    assert stub.keys[-1] == "Bearer s3cret" and "key" not in stub.requests[-1]


def test_hostile_text_is_text(page, stub):
    """As the beginning, as tokens, as alternatives, as an error and as the model's name."""
    tops = [dict.fromkeys(HOSTILE, -2.0) for _ in HOSTILE]
    stub.answer(event(HOSTILE, 0, "stop", top_logprobs=tops), DONE)
    page.write(HOSTILE[0])
    assert page.text == HOSTILE[0] + "".join(HOSTILE) and page.texts == HOSTILE
    page.tokens[0].click()
    assert {name for name, _ in page.rows()} >= {name.replace(" ", "␣") for name in HOSTILE}
    stub.answer(json.dumps({"error": {"message": HOSTILE[0]}}).encode(), status=400)
    page["rows"].find_elements(By.TAG_NAME, "button")[0].click()
    page.until(page["error"].is_displayed)
    assert page["error"].text == HOSTILE[0] and page["model"].text == "<b>stub</b>"
    assert page.driver.title == "bonsaiGPT"
    assert page.driver.find_elements(By.CSS_SELECTOR, "img, b, body script, body style") == []


LAYOUT = """
const line = [...document.querySelectorAll('.token')].at(-1).parentElement;
const once = () => {
  const span = document.createElement('span'), start = performance.now();
  span.textContent = 'x ';
  line.append(span);
  document.body.offsetHeight; // has everything laid out
  span.remove();
  return performance.now() - start;
};
return Math.min(...Array.from({length: 30}, once));
"""


def test_a_long_text_stays_quick(page, stub):
    """As many tokens as the server gives at most: the last ones take not much longer than the
    first ones. (As a single paragraph they would take 100 times as long.)"""
    words = [f"word{i % 97} " if i % 20 else "\n   " for i in range(4096)]
    stub.answer(event(words[:40], 0, "length"), DONE)
    page.write("", how="limit reached")
    short = page.js(LAYOUT)
    events, offset = [], 0
    for i in range(0, len(words), 8):
        events.append(event(words[i : i + 8], offset))
        offset += len("".join(words[i : i + 8]))
    stub.answer(*events, event([], offset, "length"), DONE)
    page.write("", how="limit reached")
    assert page.text == "".join(words) and len(page.tokens) == 4096
    assert page.js(LAYOUT) < 12 * max(short, 0.1)


def test_the_end_stays_in_sight_unless_one_scrolls_up(page, stub):
    many, more, last = ["line\n"] * 80, threading.Event(), threading.Event()
    stub.answer(event(many), more, event(many, 400), last, event(many, 800, "length"), DONE)
    distance = ("return document.querySelector('footer').getBoundingClientRect().bottom"
                " - window.innerHeight")
    page.write("", how="writing")
    page.until(lambda: len(page.tokens) == 80 and page.js(distance) < 0)
    more.set()
    page.until(lambda: len(page.tokens) == 160 and page.js(distance) < 0)
    page.js("window.scrollBy(0, -500)")
    page.until(lambda: page.js(distance) > 300)
    where = page.js("return window.scrollY")
    last.set()
    page.until(lambda: page["how"].text == "limit reached")
    assert page.js("return window.scrollY") == where and len(page.tokens) == 240
    page.js("window.scrollTo(0, 1e6)")  # back to the end
    more.clear()
    stub.answer(more, event(many, 0, "length"), DONE)
    page["go_on"].click()
    more.set()
    page.until(lambda: page["how"].text == "limit reached" and len(page.tokens) == 320)
    page.until(lambda: page.js(distance) < 0)


def test_a_phone_shows_it_without_scrolling_sideways(page, stub):
    size = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        stub.answer(event(["long" * 100, *"abcdefgh"], 0, "stop"), DONE)
        page.write("x" * 100)
        page.tokens[-1].click()
        assert page.js("return document.documentElement.scrollWidth") <= 360
        box, token = page["choices"].rect, page.js(
            "return document.querySelector('.open').getBoundingClientRect().bottom")
        top = page.js("return document.getElementById('choices').getBoundingClientRect().top")
        assert box["width"] == 360 and 0 < token <= top
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_needs_nothing_else_and_makes_no_html():
    files = sorted(ROOM.glob("page.*"))
    assert len(files) >= 3
    for file in files:
        text = file.read_text(encoding="utf-8")
        for wrong in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                      "new Function", "setAttribute(\"style\"", " style=", "onclick=", "https://",
                      "@import", "url("):
            assert wrong not in text, (file.name, wrong)
        assert text.replace("http://www.w3.org/2000/svg", "").count("http://") == 0
        assert len(text.splitlines()) <= 250
