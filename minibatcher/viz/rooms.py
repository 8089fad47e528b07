"""The map of the package: its rooms, and the way of one request through them."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from .palette import OKABE_ITO, tint
from .sheet import NOTE, finish, headline, new_sheet


@dataclass(frozen=True)
class Room:
    """A box of the map: `stops` are those of chapters/tour.md, left and bottom its place of 96 × 54."""

    name: str
    about: str
    stops: tuple[int, ...]
    colour: str
    left: float
    bottom: float
    width: float
    height: float = 9.0


ROOMS = {
    room.name: room
    for room in (
        Room("request.py", "what was asked,\nhow far it has come", (1,), "yellow", 1, 38, 18, 13),
        Room("engine.py, stepping.py", "plan, run, hand out tokens, and lose nothing", (13,), "blue", 37, 38, 58, 13),
        Room("scheduling/", "who enters, who runs,\nhow many tokens each", (2, 5, 6, 7, 8), "orange", 37, 17, 22, 13),
        Room("runners/", "a plan becomes\none forward pass", (11,), "bluish green", 73, 17, 22, 13),
        Room("kv/", "who owns which block", (3, 4), "vermillion", 37, 1, 22),
        Room("model/", "Llama", (9,), "sky blue", 67, 1, 13),
        Room("attention/", "whose keys", (10,), "sky blue", 82, 1, 13),
        Room("timeline.py", "one record a step", (12,), "reddish purple", 1, 19, 18),
        Room("metrics.py", "what it amounts to", (12,), "reddish purple", 1, 1, 18),
    )
}  # fmt: skip
# From where to where (of 96 × 54), what the arrow says, where that stands, on which side of this point.
_ARROWS = (
    ((19, 44.5), (37, 44.5), "1  submit", (28, 45.5), "center"),
    ((42, 38), (42, 30), "2  schedule(now)", (43, 33.3), "left"),
    ((48, 17), (48, 10), "3  blocks for them", (49, 13), "left"),
    ((59, 23.5), (73, 23.5), "4  StepPlan", (66, 24.5), "center"),
    ((80, 17), (75, 10), "5  logits", (76, 13), "right"),
    ((86, 17), (88, 10), "", (88, 13), "left"),
    ((84, 30), (84, 38), "6  StepResult", (83, 33.3), "right"),
    ((37, 40), (19, 26), "7  StepRecord", (28, 31.5), "left"),
    ((10, 19), (10, 10), "8  summarize", (11, 14), "left"),
)


def plot_rooms() -> Figure:
    """The rooms that the guided tour visits, with the numbers of its stops, and arrows along a request's way."""
    figure = new_sheet(5.6)
    ax = figure.subplots()
    ax.set(xlim=(0, 96), ylim=(0, 54))
    ax.axis("off")
    for room in ROOMS.values():
        _draw_room(ax, room)
    for begin, end, words, (x, y), side in _ARROWS:
        ax.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": NOTE, "linewidth": 1.4})
        if words:
            ax.text(x, y, words, ha=side, fontsize=8.5, color=NOTE)
    headline(figure, "The rooms of minibatcher, and the way of one request")
    steps = ", ".join(" ".join(words.split()) for *_, words, _, _ in _ARROWS if words)
    boxes = "; ".join(f"{room.name} ({_stops(room)}): {' '.join(room.about.split())}" for room in ROOMS.values())
    return finish(
        figure, f"A map of the package in {len(ROOMS)} boxes. {boxes}. Arrows along a request's way: {steps}."
    )


def _draw_room(ax, room: Room) -> None:
    middle, top = room.left + room.width / 2, room.bottom + room.height
    ax.add_patch(
        FancyBboxPatch(
            (room.left, room.bottom),
            room.width,
            room.height,
            boxstyle="round,pad=0,rounding_size=1",
            facecolor=tint(OKABE_ITO[room.colour], 0.25),
            edgecolor=OKABE_ITO[room.colour],
        )
    )
    ax.text(middle, top - 3.2, room.name, ha="center", fontsize=10, fontweight="bold")
    ax.text(middle, top - 4.0, room.about, ha="center", va="top", fontsize=8, linespacing=1.2)
    ax.text(middle, room.bottom + 0.7, _stops(room), ha="center", fontsize=8, color=NOTE)


def _stops(room: Room) -> str:
    return f"stop{'' if len(room.stops) == 1 else 's'} {', '.join(map(str, room.stops))}"
