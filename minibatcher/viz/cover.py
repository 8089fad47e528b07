"""The README's moving picture: static against continuous batching, as an SVG that plays in an <img>, without a script.

Drawn by steps, from simulated runs of the package's own schedulers, so it comes out the same on every machine. The
first frame, and what is seen where nothing may move, is the finished picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..claims.common import machine
from ..simulate import run_simulation
from ..timeline import RowState, Timeline
from ..workload import Workload, WorkloadRequest
from .palette import OKABE_ITO, request_colour, tint
from .plots import STRENGTH, Run, slot_runs

# Drawn once from the long-tailed generator, and kept, since another release of NumPy may draw others.
OUTPUT_TOKENS = (13, 6, 9, 7, 4, 22, 21, 39, 4, 6, 9, 6, 32, 8, 4, 12, 5, 15)
PROMPT_TOKENS = 8
SLOTS = 5
HEADLINES = {
    "static": ("Static batching", "slots stay taken until the slowest of the batch is done"),
    "chunked": ("Continuous batching", "the next request takes a slot as soon as it is free"),
}

# Sizes in the picture's own units, of which a reader's screen has about one a pixel.
WIDTH, HEIGHT = 760, 460
LEFT, RIGHT = 24, 736
ROW, BOX = 23, 20  # from one slot to the next, and height of a box
TOPS = (80, 276)  # of the panels' first rows
LINE = 30  # height of a line of the counter

# The loop, in per cent of SECONDS: what was played last stands still, is wiped away, and is played again.
SECONDS = 10
WIPE, START, END = 12, 13, 88


def runs() -> dict[str, Timeline]:
    """The same requests under both strategies; times mean nothing here, only steps."""
    requests = (
        WorkloadRequest(str(number), 0.0, PROMPT_TOKENS, tokens) for number, tokens in enumerate(OUTPUT_TOKENS, 1)
    )
    workload = Workload("cover", tuple(requests), "Drawn by minibatcher.")
    return run_simulation(workload, machine(), strategies=tuple(HEADLINES), max_num_seqs=SLOTS)


def picture() -> bytes:
    """The file that the README shows."""
    return draw(runs()).encode("utf-8")


def alternative_text(timelines: dict[str, Timeline]) -> str:
    """What is to be seen, with its numbers, for those who do not see it."""
    static, continuous = timelines.values()
    return (
        f"{len(static.requests)} requests in {static.num_slots} slots. With static batching the slots of a batch wait, "
        f"hatched, until its slowest request has ended: {len(static.steps)} steps. With continuous batching the next "
        f"request takes a slot as soon as it is free: all are done after {len(continuous.steps)} steps."
    )


def draw(timelines: dict[str, Timeline]) -> str:
    """The SVG of two runs of the same requests, the slower one first."""
    end = max(len(timeline.steps) for timeline in timelines.values())
    scale = (RIGHT - LEFT) / end
    parts, styles = [], []
    for top, (name, timeline) in zip(TOPS, timelines.items()):
        finished = [step.index + 1 for step in timeline.steps for _ in step.finished]  # the step after which each ended
        styles.append(_counting(name, [_moment(step, end) for step in finished]))
        parts += _panel(name, timeline, top, scale)
    first, second = (len(timeline.steps) for timeline in timelines.values())
    bottom = TOPS[1] + SLOTS * ROW
    body = "\n".join([*parts, *_earlier(first - second, LEFT + second * scale), *_axis(end, scale, bottom), *_keys()])
    slots = next(iter(timelines.values())).num_slots
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"
  height="{HEIGHT}" role="img" aria-labelledby="title description">
<title id="title">Static against continuous batching, in {slots} slots</title>
<desc id="description">{escape(alternative_text(timelines))}</desc>
<style>
{STYLE}{"".join(styles)}</style>
<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect width="2.2" height="7" fill="#8a8a8a"/></pattern></defs>
<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>
{body}
</svg>
"""


def _panel(name: str, timeline: Timeline, top: int, scale: float) -> Iterator[str]:
    """Headline, running count, the boxes, and what hides those that are yet to come."""
    headline, explanation = HEADLINES[name]
    count = len(timeline.requests)
    yield f'<text class="title" x="{LEFT}" y="{top - 38}">{headline}</text>'
    yield f'<text class="small" x="{LEFT}" y="{top - 13}">{explanation}</text>'
    numbers = "".join(f'<text x="50" y="{23 + LINE * i}">{i}</text>' for i in range(count + 1))
    yield (
        f'<svg class="count" x="538" y="{top - 61}" width="52" height="{LINE}">'
        f'<g class="{name}-count" transform="translate(0 {-LINE * count})">{numbers}</g></svg>'
    )
    # Of a given length, so that it ends at the margin in any font.
    yield f'<text class="title" x="{RIGHT - 138}" y="{top - 38}" textLength="138">of {count} done</text>'
    after = f"after {len(timeline.steps)} steps"
    yield f'<text class="small right {name}-end" x="{RIGHT}" y="{top - 13}">{after}</text>'
    height = timeline.num_slots * ROW
    yield f'<rect class="floor" x="{LEFT}" y="{top - 2}" width="{RIGHT - LEFT}" height="{height + 1}"/>'
    for run in slot_runs(timeline, "step"):
        yield from _box(run, top, scale)
    place = f'x="{LEFT}" y="{top - 2}" width="{RIGHT - LEFT}" height="{height + 1}"'
    yield f'<rect class="cover" visibility="hidden" {place}/>'
    yield f'<path class="head {name}-head" visibility="hidden" d="M{LEFT} {top - 6}v{height + 9}"/>'


def _box(run: Run, top: int, scale: float) -> Iterator[str]:
    left, width, y = LEFT + run.left * scale, (run.right - run.left) * scale - 1, top + run.slot * ROW
    place = f'x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BOX}"'
    colour = request_colour(run.request_id)
    if run.kind == RowState.FINISHED:
        yield f'<rect {place} fill="{colour}" fill-opacity="0.14"/><rect {place} fill="url(#hatch)"/>'
        return
    yield f'<rect {place} fill="{_hex(tint(colour, STRENGTH[run.kind]))}"/>'
    if run.kind == RowState.DECODE:
        yield f'<text class="name" x="{left + width / 2:.1f}" y="{y + 15.5}">{run.request_id}</text>'


def _earlier(steps: int, left: float) -> Iterator[str]:
    """In the room that is left in the second panel."""
    x, y = (left + RIGHT) / 2, TOPS[1] + SLOTS * ROW / 2
    yield f'<text class="title middle chunked-end" x="{x:.1f}" y="{y - 4:.0f}">all done,</text>'
    yield f'<text class="title middle chunked-end" x="{x:.1f}" y="{y + 25:.0f}">{steps} steps earlier</text>'


def _axis(end: int, scale: float, bottom: int) -> Iterator[str]:
    yield f'<path class="axis" d="M{LEFT} {bottom + 4}H{RIGHT}"/>'
    for step in range(0, end + 1, 20):
        x = LEFT + step * scale
        yield f'<path class="axis" d="M{x:.1f} {bottom + 4}v5"/>'
        side = "small" if step == 0 else "small middle"
        yield f'<text class="{side}" x="{x:.1f}" y="{bottom + 27}">{step}</text>'
    yield f'<text class="small right" x="{RIGHT}" y="{bottom + 27}">steps</text>'


def _keys() -> Iterator[str]:
    blue, y = OKABE_ITO["blue"], HEIGHT - 27
    keys = [
        (LEFT, _hex(tint(blue, STRENGTH[RowState.PREFILL])), "reads the prompt"),
        (LEFT + 210, _hex(tint(blue, STRENGTH[RowState.DECODE])), "writes the answer"),
        (LEFT + 426, "url(#hatch)", "done, but takes up its slot"),
    ]
    for x, fill, words in keys:
        yield f'<rect x="{x}" y="{y}" width="22" height="15" fill="{fill}"/>'
        yield f'<text class="small" x="{x + 30}" y="{y + 14}">{words}</text>'


def _moment(step: int, end: int) -> float:
    """When the picture has been played up to the end of a step, in per cent of the loop."""
    return START + (END - START) * step / end


def _counting(name: str, moments: list[float]) -> str:
    """The count jumps by a line whenever a request ends. moments: in per cent of the loop, rising."""
    lines = {WIPE: 0} | {moment: count for count, moment in enumerate(moments, 1)}
    frames = "".join(f"{at:.2f}%{{transform:translateY({-LINE * count}px)}}" for at, count in lines.items())
    last, done = -LINE * len(moments), moments[-1]
    way = (RIGHT - LEFT) * (done - START) / (END - START)
    return (
        f"@keyframes {name}-count{{0%{{transform:translateY({last}px)}}{frames}}}\n"
        f"@keyframes {name}-end{{0%{{opacity:1}}{WIPE}%{{opacity:0}}{done:.2f}%,100%{{opacity:1}}}}\n"
        f"@keyframes {name}-head{{0%,{START}%{{opacity:0;transform:none}}{START}.01%{{opacity:1;transform:none}}"
        f"{done:.2f}%{{opacity:1;transform:translateX({way:.1f}px)}}{done + 0.01:.2f}%,100%{{opacity:0}}}}\n"
        "@media (prefers-reduced-motion: no-preference){"
        f".{name}-count{{animation:{name}-count {SECONDS}s step-end infinite}}"
        f".{name}-end{{animation:{name}-end {SECONDS}s step-end infinite}}"
        f".{name}-head{{animation:{name}-head {SECONDS}s linear infinite}}}}\n"
    )


def _hex(rgb: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


STYLE = f"""text{{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1b1b1b}}
.title{{font-size:24px;font-weight:600}}
.count text{{font-size:24px;font-weight:600;text-anchor:end}}
.small{{font-size:17px;fill:#4a4a4a}}
.name{{font-size:14px;text-anchor:middle;fill:#000}}
.right{{text-anchor:end}}
.middle{{text-anchor:middle}}
.card{{fill:#fff;stroke:#d0d0d0}}
.floor{{fill:#f1f1f1}}
.cover{{fill:#f1f1f1;transform-origin:{RIGHT}px 0;transform:scaleX(0)}}
.axis{{stroke:#777;fill:none}}
.head{{stroke:#1b1b1b;stroke-width:2.5;opacity:0}}
@media (prefers-color-scheme: dark){{
text{{fill:#eee}}.small{{fill:#bbb}}.name{{fill:#000}}.card{{fill:#16191d;stroke:#444}}
.floor,.cover{{fill:#23272d}}.head{{stroke:#eee}}}}
@media (max-width: 480px){{.small{{font-size:20px}}.name{{font-size:16px}}}}
@keyframes cover{{0%,{WIPE}%{{transform:scaleX(0)}}{START}%{{transform:scaleX(1)}}{END}%,100%{{transform:scaleX(0)}}}}
@media (prefers-reduced-motion: no-preference){{
.cover{{visibility:visible;animation:cover {SECONDS}s linear infinite}}.head{{visibility:visible}}}}
"""
