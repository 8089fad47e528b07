"""The front pages: computed parts are right, and found when stale; badges lead somewhere; the picture plays."""

import json
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import median

import pytest

from minibatcher.cli import _parser, main
from minibatcher.labkit import blocks, front, measured
from minibatcher.labkit.notebooks import BuildError, set_up_cell
from minibatcher.tomlfile import read_toml
from minibatcher.viz import cover
from minibatcher.viz.check import in_palette

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
PICTURE = ROOT / front.PICTURE
REPOSITORY = read_toml(ROOT / "pyproject.toml")["project"]["urls"]["Repository"]


def part(name):
    """A computed part of the README."""
    return re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", README, re.DOTALL)[1]


def rows(text):
    """The cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def copy(tmp_path):
    """What the front pages are made of, for a test that changes it."""
    for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "chapters", tmp_path / "chapters", ignore=shutil.ignore_patterns("*.ipynb", ".*"))
    assert blocks.stale(tmp_path) == []
    return tmp_path


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", newline="\n")


def test_the_chapters_and_their_minutes_are_those_of_the_notebooks():
    found = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "chapters").glob("7.*.ipynb"))}
    wanted = [
        (name, re.search(r"\*\*In this chapter\*\* \(about (\d+) minutes\)", text)[1]) for name, text in found.items()
    ]
    told = [(re.search(r"\(chapters/(.+?)\)", row[0])[1], row[2]) for row in rows(part("chapters"))]
    assert told == wanted and len(told) == len(front.ABOUT)


def test_the_state_of_the_book_is_counted_from_the_manifests():
    folder = ROOT / "minibatcher" / "labkit"
    exercises = read_toml(folder / "exercises.toml")["exercise"]
    claims = [row for row in read_toml(folder / "syllabus.toml")["row"] if row["kind"] == "claim"]
    table = rows(part("status"))
    for row in table[:-1]:
        number, lab = row[0], re.match(r"\[(.+?)\]", row[3])[1]
        own = [claim for claim in claims if claim["chapter"] == number]
        tests = {test for claim in own for test in claim["tests"]}
        assert row[1:3] == ([str(len(own)), str(len(tests))] if lab != "capstone" else ["", ""])
        of_lab = [exercise for exercise in exercises if exercise["lab"] == lab]
        sums = [sum(exercise[key] for exercise in of_lab) for key in ("points", "minutes")]
        assert row[5:] == [str(len(of_lab)), *map(str, sums)]
    total = [len(claims), len({test for claim in claims for test in claim["tests"]})]
    sums = [len(exercises), *(sum(exercise[key] for exercise in exercises) for key in ("points", "minutes"))]
    assert table[-1] == ["in all", *map(str, total), "", "", *map(str, sums)]


def test_every_chapter_and_lab_has_a_badge_that_opens_its_file():
    place = REPOSITORY.removeprefix("https://github.com/")
    opened = re.findall(rf"\(https://colab\.research\.google\.com/github/{place}/blob/main/([^)]+)\)", README)
    assert README.count("colab.research.google.com/github/") == len(opened) == README.count(front.BADGE)
    assert all((ROOT / path).is_file() for path in opened)
    wanted = {
        path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("chapters/7.*.ipynb"), *ROOT.glob("labs/*.ipynb")]
    }
    assert sorted(opened) == sorted(wanted | {"chapters/index.ipynb"})


def test_the_repository_is_named_in_one_place(copy):
    edit(copy / "pyproject.toml", REPOSITORY, "https://github.com/somebody/else")
    pages = ["README.md", "CONTRIBUTING.md", "chapters/install.md"]
    assert [problem.split(":")[0] for problem in blocks.stale(copy)] == pages
    blocks.write(copy)
    texts = [(copy / page).read_text(encoding="utf-8") for page in pages]
    assert all(REPOSITORY.removeprefix("https://") not in text and "somebody/else" in text for text in texts)
    assert "github/somebody/else/blob/main/labs/lab-7.1.ipynb" in texts[0]
    assert blocks.stale(copy) == []


def test_a_copy_that_is_not_on_github_has_no_badges(copy):
    edit(copy / "pyproject.toml", REPOSITORY, "https://example.org/book")
    blocks.write(copy)
    text = (copy / "README.md").read_text(encoding="utf-8")
    assert "colab" not in text.replace("chapters/colab", "") and "https://example.org/book" in text


@pytest.mark.parametrize("line", ["", "Repository = 3", 'Repository = ""', 'Repository = "https://github.com"'])
def test_pyproject_must_say_where_the_book_is(line, copy):
    edit(copy / "pyproject.toml", f'Repository = "{REPOSITORY}"', line)
    with pytest.raises(BuildError, match="names no Repository"):
        blocks.stale(copy)
    with pytest.raises(BuildError, match="names no Repository"):
        set_up_cell(copy)


@pytest.mark.parametrize("name", [name for name in blocks.BLOCKS if f"<!-- begin {name} -->" in README])
def test_an_edited_figure_is_found(name, copy):
    text = (copy / "README.md").read_text(encoding="utf-8")
    start = text.index(f"<!-- begin {name} -->") + len(f"<!-- begin {name} -->")
    place = start + re.search(r"\w(?=[^\w]*<!-- end)|\d", text[start:]).start()
    (copy / "README.md").write_text(f"{text[:place]}§{text[place + 1 :]}", encoding="utf-8", newline="\n")
    assert blocks.stale(copy) == ["README.md: a computed part is out of date; run: make generated"]
    blocks.write(copy)
    assert (copy / "README.md").read_text(encoding="utf-8") == text


def test_a_part_that_nobody_computes_is_refused(copy):
    edit(
        copy / "README.md", "<!-- begin start -->", "<!-- begin nothing -->\n<!-- end nothing -->\n<!-- begin start -->"
    )
    with pytest.raises(BuildError, match="no computed part is named 'nothing'"):
        blocks.stale(copy)


@pytest.mark.parametrize(
    "old, new",
    [
        ("<!-- end status -->", ""),
        ("<!-- begin status -->", ""),
        ("<!-- end status -->", "<!-- end stats -->"),
        ("<!-- begin status -->", "<!--  Begin status -->"),
        ("<!-- begin status -->", "<!-- begin status --> Computed:"),
    ],
)
def test_half_a_mark_is_refused(old, new, copy):
    edit(copy / "README.md", old, new)
    with pytest.raises(BuildError, match=r"README\.md: .* marks nothing"):
        blocks.stale(copy)


def test_a_part_without_its_marks_is_missed(copy):
    for mark in ("<!-- begin status -->", "<!-- end status -->"):
        edit(copy / "README.md", f"{mark}\n", "")
    assert blocks.stale(copy) == ["no page shows the computed part 'status'; put the marks around it back"]


@pytest.mark.parametrize(
    "name, content, part",
    [
        ("measured/cold-start.json", None, "class-needs"),
        ("measured/cold-start.json", "{", "class-needs"),
        ("measured/cold-start.json", '{"lab": {}, "kernels": {}}', "class-needs"),
        ("measured/comparison-2.json", "{", "comparison"),
        ("measured/comparison-2.json", "[]", "comparison"),
        ("measured/comparison-2.json", '{"clock": "measured", "measured": {}}', "comparison"),
    ],
)
def test_a_spoilt_measurement_is_named(name, content, part, copy):
    path = copy / "chapters" / name
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    with pytest.raises(BuildError, match=rf"\.md: the part '{part}' can't be computed, .* chapters/measured"):
        blocks.stale(copy)


@pytest.mark.parametrize("line", ["version", "requires-python", "released"])
def test_a_line_that_pyproject_lacks_is_told(line, copy):
    edit(copy / "pyproject.toml", f"{line} = ", f"a{line} = ")
    with pytest.raises(BuildError, match=f"can't be computed, for pyproject.toml .*{line}"):
        blocks.stale(copy)


def test_a_page_that_is_no_text_is_named(copy):
    (copy / "chapters" / "class.md").write_bytes(b"\xfc")
    with pytest.raises(BuildError, match=r"can't read .*class\.md"):
        blocks.stale(copy)


def test_pages_alone_can_be_renewed(copy, capsys):
    good = (copy / "README.md").read_text(encoding="utf-8")
    edit(copy / "README.md", "| minutes |", "| hours |")
    assert main(["labs", "build", "--pages", "--root", str(copy)]) == 0
    assert (copy / "README.md").read_text(encoding="utf-8") == good and not list(copy.rglob("*.ipynb"))
    assert main(["labs", "build", "--pages", "--check"]) == 2
    assert "--pages takes neither names nor --check" in capsys.readouterr().err


def test_an_edited_or_lost_picture_is_found(copy):
    path = copy / front.PICTURE
    for harm in (lambda: edit(path, "Static batching", "Static"), path.unlink):
        harm()
        assert blocks.stale(copy) == [f"{front.PICTURE}: it is out of date; run: make generated"]
        blocks.write(copy)
        assert path.read_bytes() == PICTURE.read_bytes()


def test_a_chapter_without_its_time_is_refused(copy):
    edit(copy / "chapters" / "7.1-static-and-dynamic.md", "**In this chapter** (about", "**Here** (about")
    with pytest.raises(BuildError, match=r"7\.1-static-and-dynamic\.md needs a title"):
        blocks.stale(copy)


def test_the_citation_names_this_version():
    project = read_toml(ROOT / "pyproject.toml")
    version, year = project["project"]["version"], project["tool"]["minibatcher"]["released"][:4]
    said = part("citation")
    assert f"version = {{{version}}}" in said and f"(Version {version})" in said
    assert f"year    = {{{year}}}" in said and f"({year})." in said
    assert said.count(REPOSITORY) == 2


def test_what_the_two_commands_need_is_what_pyproject_says(copy):
    assert f"Python {read_toml(ROOT / 'pyproject.toml')['project']['requires-python'][2:]} or later" in part("start")
    edit(copy / "pyproject.toml", 'requires-python = ">=3.10"', 'requires-python = ">=3.12"')
    assert "Both need Python 3.12 or later, make and git." in front.start(copy)


# The picture.


def test_the_picture_is_what_the_schedulers_did():
    runs = cover.runs()
    tokens = cover.OUTPUT_TOKENS
    batches = [tokens[i : i + cover.SLOTS] for i in range(0, len(tokens), cover.SLOTS)]
    waits, steps = sum(max(batch) - one for batch in batches for one in batch), sum(map(max, batches))
    assert len(runs["static"].steps) == steps
    scale = (cover.RIGHT - cover.LEFT) / steps
    boxes = {name: [] for name in ("work", "wait")}
    for box in ET.fromstring(cover.picture()).iter(f"{SVG}rect"):
        if box.get("height") == str(cover.BOX) and float(box.get("x")) >= cover.LEFT:
            kind = "wait" if box.get("fill") == "url(#hatch)" else "work" if not box.get("fill-opacity") else None
            if kind:
                boxes[kind].append((float(box.get("y")), (float(box.get("width")) + 1) / scale))
    assert sum(width for _, width in boxes["wait"]) == pytest.approx(waits, abs=0.5)
    for top in cover.TOPS:  # both panels show the same work: a token of each answer a step, the first with the prompt
        drawn = sum(width for y, width in boxes["work"] if top <= y < top + cover.SLOTS * cover.ROW)
        assert drawn == pytest.approx(sum(cover.OUTPUT_TOKENS), abs=0.5)
    assert all(y < cover.TOPS[1] for y, _ in boxes["wait"])  # nobody waits under continuous batching
    for number in (len(run.steps) for run in runs.values()):
        assert f"after {number} steps" in PICTURE.read_text(encoding="utf-8") and f"{number} steps" in part("picture")


def test_the_picture_is_safe_small_and_has_words():
    assert PICTURE.read_bytes() == cover.picture() == cover.picture()
    assert len(cover.picture()) < 60_000
    tree = ET.fromstring(cover.picture())
    assert tree.get("role") == "img"
    labels = [tree.find(f"{SVG}*[@id='{name}']") for name in tree.get("aria-labelledby").split()]
    assert [label.tag for label in labels] == [f"{SVG}title", f"{SVG}desc"] and all(label.text for label in labels)
    for element in tree.iter():
        assert element.tag.removeprefix(SVG) not in ("script", "foreignObject", "image", "use", "animate", "set")
        for key, value in element.attrib.items():
            assert not key.startswith("on") and "href" not in key
            assert "url(" not in value or value == "url(#hatch)"
    style = tree.find(f"{SVG}style").text
    assert "url(" not in style and "@import" not in style
    colours = {box.get("fill") for box in tree.iter(f"{SVG}rect") if (box.get("fill") or "").startswith("#")}
    assert len(colours) > len(cover.OKABE_ITO)
    for colour in colours:
        assert in_palette(tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))), colour


SEEK = """([seconds, line]) => {
  for (const animation of document.getAnimations()) { animation.pause(); animation.currentTime = 1000 * seconds; }
  const count = name => Math.round(-new DOMMatrix(getComputedStyle(
    document.querySelector(`.${name}-count`)).transform).f / line);
  const widths = [...document.querySelectorAll('.cover')].map(cover =>
    getComputedStyle(cover).visibility === 'hidden' ? 0 : cover.getBoundingClientRect().width);
  return [count('static'), count('chunked'), ...widths];
}"""


def seek(page, seconds):
    """The two counts, and how many pixels of each panel are hidden, so many seconds into the loop."""
    return page.evaluate(SEEK, [seconds, cover.LINE])


def test_the_picture_plays_and_begins_with_its_end(open_page):
    page = open_page(PICTURE, width=800, height=500)
    total, runs = len(cover.OUTPUT_TOKENS), cover.runs()
    assert seek(page, 0) == [total, total, 0, 0] == seek(page, 0.99 * cover.SECONDS)
    end = len(runs["static"].steps)
    for step in (0, 20, 40, len(runs["chunked"].steps) + 1, end - 1):
        now = cover.SECONDS * (cover._moment(step, end) + 0.02) / 100
        done = [sum(len(s.finished) for s in run.steps if s.index < step) for run in runs.values()]
        static, continuous, *covers = seek(page, now)
        assert [static, continuous] == done
        assert covers == pytest.approx([(cover.RIGHT - cover.LEFT) * (1 - step / end)] * 2, abs=2)
    assert done[0] < done[1] == total  # static still has to go on


def test_the_picture_stands_still_for_who_asks_for_it(chromium):
    context = chromium.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(PICTURE.as_uri())
    assert page.evaluate("document.getAnimations().length") == 0
    total = len(cover.OUTPUT_TOKENS)
    assert seek(page, 0) == [total, total, 0, 0]
    context.close()


def test_no_letter_leaves_the_picture(open_page):
    page = open_page(PICTURE, width=800, height=500)
    outside = page.evaluate(
        """margin => [...document.querySelectorAll('text')].filter(text => {
          const box = text.getBoundingClientRect(), card = document.querySelector('.card').getBoundingClientRect();
          return box.left < card.left + margin || box.right > card.right - margin;
        }).map(text => text.textContent)""",
        8,
    )
    assert outside == []


# Measured runs.


def fake_run(speed, clock="measured", load=0.1, **header):
    def strategy(factor):
        return {
            "num_requests": 48, "output_tokens_per_s": speed * factor, "slot_occupancy": 0.5, "header": {},
            "ttft_ms": {"p50": speed * factor / 1.1, "p99": 2_000}, "itl_ms": {"p99": speed * factor * 3 / 11},
        }  # fmt: skip

    software = {"minibatcher": "0", "torch": "2", "python": "3", "system": "Linux"}
    same = {
        "max_num_seqs": 16, "workload": {"name": "w"}, "model": "m", "model_fingerprint": "f", "dtype": "float32",
        "attention": "sdpa", "seed": 0, "hardware": {"device": "CPU", "threads": 2}, "software": software,
    }  # fmt: skip
    return {
        "clock": clock, "header": same | header, "answers_identical": True,
        "strategies": {"static": strategy(1), "chunked": strategy(3)},
        "measured": {"date": "2026-01-02T03:04:05+00:00", "git_commit": "abcdef0123456", "load_average": load,
                     "num_cpus": 2},
    }  # fmt: skip


def table_of(tmp_path, *runs):
    folder = tmp_path / measured.FOLDER
    folder.mkdir(parents=True)
    for number, run in enumerate(runs, 1):
        (folder / f"comparison-{number}.json").write_text(json.dumps(run), encoding="utf-8")
    return measured.comparison(tmp_path)


def test_the_table_of_measured_runs_holds_medians_and_spread(tmp_path):
    text = table_of(tmp_path, fake_run(100), fake_run(140), fake_run(110))
    assert rows(text)[0] == ["static", "110 (100, 140)", "0.100 / 2.00", "30.0", "50 %"]
    assert rows(text)[1] == ["chunked", "330 (300, 420)", "0.300 / 2.00", "90.0", "50 %"]
    assert "The fastest, **chunked**" in text and "3.0 times as long as with **static**" in text
    assert "**Measured** (wall clock): 3 runs" in text and "2026-01-02" in text and "commit abcdef0123" in text
    assert "busy" not in text and "simulated" not in text.lower()


def test_a_busy_machine_is_told(tmp_path):
    assert "busy with other work, load 0.10 to 1.5 on 2" in table_of(tmp_path, fake_run(1), fake_run(1, load=1.5))


@pytest.mark.parametrize(
    "runs, sentence",
    [
        ([], "holds no comparison"),
        ([fake_run(1, clock="simulated")], "not measured"),
        ([fake_run(1), fake_run(1, seed=1)], "differ in more than time"),
        ([fake_run(1) | {"answers_identical": False}], "different answers"),
    ],
)
def test_what_is_no_set_of_measured_runs_is_refused(runs, sentence, tmp_path):
    with pytest.raises(BuildError, match=sentence):
        table_of(tmp_path, *runs)


def test_the_readme_shows_the_runs_that_are_kept():
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / measured.FOLDER).glob("comparison-*.json")]
    assert len(kept) >= 3
    for row in rows(part("comparison")):
        speeds = [run["strategies"][row[0]]["output_tokens_per_s"] for run in kept]
        said = [float(number.replace(",", "")) for number in re.findall(r"[\d,.]*\d", row[1])]
        assert said == pytest.approx([median(speeds), min(speeds), max(speeds)], rel=0.01)
    assert {len(run["strategies"]) for run in kept} == {len(rows(part("comparison")))}
    assert "**Measured** (wall clock)" in part("comparison")


# Commands.

COMMANDS = [
    re.sub(r"^M ", "minibatcher ", command)
    for name in ("README.md", "chapters/cookbook.md")
    for command in re.findall(
        r"`((?:M|minibatcher) [a-z](?:(?!--help)[^`])*)`", (ROOT / name).read_text(encoding="utf-8")
    )
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_front_pages_are_understood(command):
    assert _parser().parse_args(shlex.split(command)[1:]).run


def test_commands_were_found():
    assert len(COMMANDS) > 20
    with pytest.raises(SystemExit):
        _parser().parse_args(["compare", "--no-such"])
