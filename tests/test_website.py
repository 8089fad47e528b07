"""The book as a website: built once, walked link by link, looked at by day, by night, small and on paper."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import has_light_ink, num_colours, screenshot

pytest.importorskip("sphinx", reason="no Sphinx here: pip install 'minibatcher[book]', to build the website")
pytest.importorskip("myst_nb", reason="no myst-nb here: pip install 'minibatcher[book]', to build the website")

from minibatcher.labkit.website import contents, fold

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted(path.stem for path in ROOT.glob("chapters/7.*.ipynb"))
PHONE, PAPER = 390, 680  # CSS pixels: a phone; A4 between margins of 15 mm
# Elements of the text that reach over the right edge, and no box of theirs scrolls.
TOO_WIDE = """() => [...document.querySelectorAll(".bd-article *")].filter(e => {
  if (e.getBoundingClientRect().right <= innerWidth + 1 || e.closest(".visually-hidden, mjx-container")) return false;
  for (let box = e; box && !box.matches(".bd-article"); box = box.parentElement)
    if (/auto|scroll/.test(getComputedStyle(box).overflowX) && box.getBoundingClientRect().right <= innerWidth + 1)
      return false;
  return true;
}).map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`)"""
# The same on paper, where no box scrolls.
OFF_PAPER = """() => [...document.querySelectorAll("body *")]
  .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`)"""
# Text and its ground, of every element that has words of its own and a plain ground: those that stand out too little.
PALE = """() => {
  const parse = css => (css.match(/[\\d.]+/g) || []).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + [0.2126, 0.7152, 0.0722][i] * v, 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const isText = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll("main *, .bd-sidebar *")]
  .filter(e => isText(e) && e.checkVisibility() && !e.closest("button, .headerlink, [id^=minibatcher-]"))
  .map(e => {
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), `${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`];
  }).filter(([contrast]) => contrast < 4.5).map(([contrast, words]) => `${contrast.toFixed(1)} ${words}`);
}"""
DATA = "root => Object.assign({}, ...[...root.querySelectorAll('*')].map(e => ({ ...e.dataset })))"


def build(source: Path, settings: Path, target: Path) -> subprocess.CompletedProcess:
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(settings), str(source), str(target)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=source)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The whole book. A warning is an error."""
    target = tmp_path_factory.mktemp("book")
    done = build(ROOT, ROOT / "chapters", target)
    assert (done.returncode, done.stderr) == (0, "")
    return target


class Page(HTMLParser):
    """What a page refers to: links of people, things that a browser fetches, ids, and pictures without words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.wordless = 0
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and "href" in found:
            self.fetched.append(found["href"])
        self.fetched += [found[key] for key in ("src", "srcset", "data", "poster") if tag != "a" and found.get(key)]
        if tag == "meta" and found.get("http-equiv") == "refresh":
            self.links.append(found["content"].partition("url=")[2])
        self.wordless += tag == "img" and not (found.get("alt") or "").strip()


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}


def is_foreign(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))


def test_every_notebook_is_a_page(pages, site):
    notebooks = [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("labs/*.ipynb")]
    expected = {site / path.relative_to(ROOT).with_suffix(".html") for path in notebooks}
    assert expected <= set(pages)
    assert Page(site / "index.html").links[-1] == "chapters/index.html"


def test_the_front_page_opens_the_contents(site, open_page):
    open_page(site / "index.html").wait_for_url("**/chapters/index.html")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_first_window_says_what_this_is(site, open_page, theme):
    page = open_page(site / "chapters" / "index.html", width=1300, theme=theme)
    picture, begin = page.locator("article img"), page.get_by_role("link", name="7.0 Why batch at all").nth(1)
    for shown in (picture, begin):
        box = shown.bounding_box()
        assert box["y"] + box["height"] < 900
    assert begin.locator("xpath=..").inner_text().startswith("Begin with")
    assert picture.evaluate("e => [e.naturalWidth > 0, getComputedStyle(e).backgroundColor]") == [
        True,
        "rgba(0, 0, 0, 0)",
    ]
    page.locator(".bd-sidebar-primary").get_by_text("How an LLM server batches requests").wait_for()
    screenshot(page, f"website-front-{theme}")


def test_colab_gets_no_picture_from_beside_the_notebook():
    for path in [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("labs/*.ipynb")]:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any("![" in "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"), path.name


def test_tabs_and_search_engines_tell_pages_apart(pages, site):
    titles, descriptions = [], []
    for path, page in pages.items():
        if path.parent == site and path.stem != "CONTRIBUTING":
            continue
        titles += re.findall(r"<title>(.+)</title>", page.text)
        descriptions += re.findall(r'<meta name="description" content="(.{60,})">', page.text)
    assert len(set(descriptions)) == len(descriptions) == len(titles) == len(set(titles)) > 15
    assert all(title.count("How an LLM") == 1 for title in titles)


@pytest.mark.parametrize("width", [1300, 1600])
def test_lines_of_prose_are_short_enough_to_follow(site, open_page, width):
    page = open_page(site / "chapters" / f"{CHAPTERS[0]}.html", width=width)
    assert max(page.locator("section > p").evaluate_all("all => all.map(e => e.clientWidth)")) <= 46 * 16
    lines = page.locator(".cell_output .output:not(.text_html) pre:visible")
    assert lines.evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length") == 0


def test_links_and_anchors_lead_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for address in [*page.links, *page.fetched]:
            if is_foreign(address) or address.startswith(("data:", "mailto:")):
                continue
            name, _, anchor = unquote(address).partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not target.is_file():
                broken.append(f"{path.name}: {address}")
            elif anchor and target in pages and anchor not in pages[target].ids:
                broken.append(f"{path.name}: {address} has no such heading")
    assert broken == []


def test_nothing_comes_from_elsewhere(pages, site):
    assert [
        (path.name, address) for path, page in pages.items() for address in page.fetched if is_foreign(address)
    ] == []
    imports = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""")
    assert [path.name for path in site.rglob("*.css") if imports.search(path.read_text(encoding="utf-8"))] == []


def test_links_out_of_the_site_lead_to_the_project(pages, site):
    links = pages[site / "chapters" / "index.html"].links
    repository = re.search(
        r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )[1]
    assert f"{repository}/blob/main/solutions/lab-7.1.ipynb" in links
    assert f"{repository}/blob/main/chapters/index.md" in links
    path = repository.removeprefix("https://github.com/")
    for page in CHAPTERS:
        colab = f"https://colab.research.google.com/github/{path}/blob/main/chapters/{page}.ipynb"
        assert colab in pages[site / "chapters" / f"{page}.html"].links
    to_files = [link for page in pages.values() for link in page.links if link.startswith(f"{repository}/blob/main/")]
    names = {unquote(link.removeprefix(f"{repository}/blob/main/")).partition("?")[0] for link in to_files}
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_pictures_have_words(pages):
    assert {path.name: page.wordless for path, page in pages.items() if page.wordless} == {}


def test_formulas_are_mathml(pages, site):
    for name in ("7.0-why-batch-at-all", "glossary"):
        assert "<math " in pages[site / "chapters" / f"{name}.html"].text
    assert all("$$" not in page.text and "MathJax" not in page.text for page in pages.values())


def test_a_mistake_in_a_page_stops_the_build(tmp_path):
    text = "# Page\n\n$\\wrong{x}$\n\n[a file](missing.py)\n\n[a heading](#Missing)\n\n$\\frac{1}{2$\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    settings = (ROOT / "chapters" / "conf.py").read_text(encoding="utf-8")
    settings = settings.replace("ROOT = Path(__file__).resolve().parents[1]", f"ROOT = Path({str(ROOT)!r})")
    settings += '\nroot_doc, include_patterns, html_static_path, html_favicon = "page", ["page.md"], [], None'
    (tmp_path / "conf.py").write_text(settings, encoding="utf-8")
    done = build(tmp_path, tmp_path, tmp_path / "built")
    assert done.returncode == 1
    for words in (
        "page.md:3: WARNING: the formula '\\\\wrong{x}' is not understood",
        "'missing.py'",
        "'Missing'",
        "a brace lacks",
    ):
        assert words in done.stderr


def test_contents_leave_no_page_out():
    documents = {f"chapters/{name}" for name in ("index", "7.0-a", "7.1-b", "glossary", "tour", "install", "recipes")}
    documents |= {"labs/capstone", "labs/lab-7.0", "CONTRIBUTING"}
    assert contents(documents) == {
        "Start": ["chapters/install"],
        "Chapters": ["chapters/7.0-a", "chapters/7.1-b"],
        "Labs": ["labs/lab-7.0", "labs/capstone"],
        "Reference": ["chapters/tour", "chapters/glossary", "CONTRIBUTING", "chapters/recipes"],
    }


def test_what_is_folded_in_jupyterlab_is_folded_here(pages, site):
    cell = {"metadata": {"jupyter": {"outputs_hidden": True}}, "source": ["1"], "outputs": [{}]}
    fold(cell)
    assert cell["metadata"]["tags"] == ["hide-output"]
    for name in CHAPTERS:
        notebook = json.loads((ROOT / "chapters" / f"{name}.ipynb").read_text(encoding="utf-8"))
        hidden = [cell["metadata"].get("jupyter", {}) for cell in notebook["cells"] if cell.get("outputs")]
        text = pages[site / "chapters" / f"{name}.html"].text
        answers = sum(bool(h.get("outputs_hidden")) for h in hidden)
        assert text.count('<p class="collapsed admonition-title">Guess first. Then open: ') == answers > 0
        assert "<details open" not in text


def settled(page, change: Callable[[], None]) -> dict[str, str]:
    change()
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.locator("[id^=minibatcher-]").first.evaluate(DATA)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", CHAPTERS)
def test_pictures_move_without_a_kernel(site, open_page, name, theme):
    page = open_page(site / "chapters" / f"{name}.html", theme=theme)
    roots = page.locator("[id^=minibatcher-]")
    assert roots.count() > 0
    assert roots.evaluate_all("all => all.every(e => e.querySelector('canvas, svg'))")
    first, before = roots.first, roots.first.evaluate(DATA)
    kind = first.get_attribute("id").split("-")[1]
    if kind in ("slots", "memory"):
        after = settled(page, first.get_by_label("to the first step").click)
        later = settled(page, first.get_by_label("one step on").click)
        assert float(after["now"]) < float(later["now"]) < float(before["extent"])
        assert num_colours(first.locator("canvas").first) > 20
    elif kind == "roofline":
        after = settled(page, lambda: first.locator("input.batch[type=range]").press("ArrowRight"))
        assert int(after["batch"]) == int(before["batch"]) + 1
        assert float(after["intensity"]) > float(before["intensity"])
    else:
        after = settled(page, first.get_by_role("button", name="sorted by prompt").click)
        assert after["batches"] != before["batches"]
    assert has_light_ink(page, f"#{first.get_attribute('id')} > div > *") == (theme == "dark")
    screenshot(page, f"website-{name}-{theme}")


def test_pictures_follow_the_switch(site, open_page):
    page = open_page(site / "chapters" / f"{CHAPTERS[2]}.html")
    place = "[id^=minibatcher-] > div > *"
    for mode in ("dark", "light"):
        page.locator(".theme-switch-button:visible").first.click()
        page.locator(f".theme-change-button[data-mode={mode}]:visible").click()
        assert page.locator("html").get_attribute("data-theme") == mode
        assert has_light_ink(page, place) == (mode == "dark")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out(site, open_page, theme):
    for name in (CHAPTERS[-1], CHAPTERS[2], "glossary"):
        assert open_page(site / "chapters" / f"{name}.html", theme=theme).evaluate(PALE) == []


def test_a_diff_is_dark_on_a_dark_page(site, open_page):
    page = open_page(site / "chapters" / f"{CHAPTERS[2]}.html", theme="dark")
    grounds = page.locator("pre:visible").evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
    light = [g for g in grounds if "0)" not in g and min(map(float, re.findall(r"[\d.]+", g)[:3])) > 128]
    assert len(grounds) > 20 and light == []


def test_every_page_fits_a_phone_and_paper(pages, open_page, site):
    page = open_page(site / "search.html", width=PHONE)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    wrong = []
    for path in pages:
        if path == site / "index.html":  # leaves at once for the contents
            continue
        page.set_viewport_size({"width": PHONE, "height": 800})
        page.emulate_media(media="screen")
        page.goto(path.as_uri(), wait_until="load")
        if page.evaluate("() => document.documentElement.scrollWidth") > PHONE:
            wrong.append(f"{path.name} scrolls sideways")
        wrong += [f"{path.name} on a phone: {words}" for words in page.evaluate(TOO_WIDE)]
        page.emulate_media(media="print")
        page.set_viewport_size({"width": PAPER, "height": 960})
        wrong += [f"{path.name} on paper: {words}" for words in page.evaluate(OFF_PAPER)]
    assert wrong == []
    assert [address for address in requests if is_foreign(address)] == []


def test_paper_shows_stills_and_no_sidebars(site, open_page, tmp_path):
    page = open_page(site / "chapters" / f"{CHAPTERS[2]}.html", theme="dark")
    page.emulate_media(media="print")
    assert page.locator(".for-paper img:visible").count() == page.locator("[id^=minibatcher-]").count() > 0
    for hidden in (".bd-sidebar-primary", ".bd-sidebar-secondary", ".bd-header-article", "[id^=minibatcher-]"):
        assert page.locator(f"{hidden}:visible").count() == 0
    page.emulate_media(media=None)
    page.pdf(path=tmp_path / "chapter.pdf", format="A4", print_background=True)
    boxes = set(re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", (tmp_path / "chapter.pdf").read_bytes()))
    assert len(boxes) == 1 and float(boxes.pop()[0]) < 600


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def served(site) -> Iterator[str]:
    """The site's address on a server of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("place", ["server", "files"])
def test_search_finds_its_chapter(site, served, open_page, place):
    start = served if place == "server" else site.as_uri()
    page = open_page(f"{start}/search.html?q=continuous+batching")
    page.wait_for_selector(".search li a")
    page.wait_for_function("() => /found/.test(document.querySelector('#search-results').innerText)")
    found = page.locator("#search-results li a").evaluate_all("links => links.map(a => a.getAttribute('href'))")
    assert any("7.2-continuous-batching.html" in link for link in found)
