"""Looking on while an engine serves: slots as they fill, and beside them what a device's «utilisation» leaves out."""

from __future__ import annotations

import html
import math
import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from ..background import THREAD_NAME, BackgroundRun
from ..engine import Engine
from ..errors import MissingDependency
from ..request import Request
from ..timeline import Timeline
from .palette import OKABE_ITO
from .slots import animate
from .trace import columns

WINDOW_S = 2.0  # what the panel calls now


class LiveView:
    """Serves `requests` in a thread and shows the slots filling; other cells stay usable meanwhile.

    Show it by ending a cell with it; that starts the run. Buttons stop it, or abort one request. When it has ended, the
    numbers and the moving picture of the whole run take its place, which need no kernel. `timeline` is the record.
    Raises MissingDependency without ipywidgets and anywidget.
    """

    def __init__(self, engine: Engine, requests: Iterable[Request], *, every_s: float = 0.1) -> None:
        try:
            import ipywidgets
        except ImportError as error:
            raise MissingDependency(
                "a live view needs ipywidgets and anywidget: pip install 'minibatcher[lab]'; "
                "animate(engine.run(requests)) shows the same afterwards"
            ) from error
        self.run = BackgroundRun(engine, requests, self._show, every_s)
        self.slots = animate(engine.timeline, live=True).widget()
        self.panel = ipywidgets.HTML()
        self.stop_button = ipywidgets.Button(description="Stop", tooltip="end the run after this step")
        self.request_box = ipywidgets.Text(placeholder="request id", layout={"width": "11em"})
        self.abort_button = ipywidgets.Button(description="Abort it", tooltip="end this request and leave the others")
        self.stop_button.on_click(lambda _: self.run.request_stop())
        self.abort_button.on_click(lambda _: self._abort(self.request_box.value.strip()))
        self.slots.observe(self._heard, "state")
        self._said = ""
        self._shown = 0  # steps
        self._display = None
        buttons = ipywidgets.HBox([self.stop_button, self.request_box, self.abort_button])
        self.box = ipywidgets.VBox([self.panel, self.slots, buttons])

    @property
    def timeline(self) -> Timeline:
        """What has happened. While the run goes on, use `look`."""
        return self.run.timeline

    def start(self) -> LiveView:
        """Begin to serve; showing the view does it, too. Raises what Engine.run would raise."""
        self.run.start()
        return self

    def look(self, read) -> Any:
        """read(timeline), between two steps."""
        return self.run.call(lambda: read(self.run.timeline))

    def stop(self) -> None:
        """End the run after the step at hand, abort what is left, and return when it has ended."""
        self.run.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all requests have ended; says whether they have."""
        return self.run.wait(timeout_s)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if not self.run.started:
            self.start()
        self._display = display(self.box, display_id=True)
        if not self.run.running:  # shown again after its end
            self._end()

    def _heard(self, change: dict[str, Any]) -> None:
        """From the picture: a request that was tapped, or the step from which on messages were lost."""
        name, wanted = change["new"].get("request"), change["new"].get("wanted")
        if name:
            self.request_box.value = name
        if wanted is not None and wanted != (change["old"] or {}).get("wanted"):
            self.run.post(lambda: self._show_from(wanted))

    def _show_from(self, first_step: int) -> None:
        self._shown = first_step
        self._show(self.timeline)

    def _abort(self, request_id: str) -> None:
        self.run.post(lambda: self._say(self.run.engine.abort(request_id), request_id))

    def _say(self, aborted: bool, request_id: str) -> None:
        self._said = f"{request_id} aborted" if aborted else f"no request {request_id!r} is waiting or running"

    def _show(self, timeline: Timeline) -> None:
        """Runs in the engine's thread, between two steps; so what it sends is whole."""
        running = self.run.running
        if len(timeline.steps) > self._shown:
            self.slots.tell(*columns(timeline, self._shown))
            self._shown = len(timeline.steps)
        said = [self._said, self._ending(running)]
        if running and sum(thread.name == THREAD_NAME for thread in threading.enumerate()) > 1:
            said.append("another run goes on in this kernel: each slows the other down")
        self.panel.value = panel(recent(timeline, self.run.engine.clock.now()), " · ".join(filter(None, said)))
        if not running:
            self._end()

    def _ending(self, running: bool) -> str:
        if running:
            return ""
        if self.run.error is not None:
            return f"ended by an error: {self.run.error}"
        ending = "stopped" if self.timeline.header.get("interrupted") else "all requests have ended"
        errors = [record.error for record in self.timeline.requests.values() if record.finish_reason == "error"]
        return f"{ending}, {len(errors)} with an error: {errors[0]}" if errors else ending

    def _end(self) -> None:
        self.stop_button.disabled = self.abort_button.disabled = True
        if self._display is None or not self.timeline.steps:
            return
        film, end = animate(self.timeline)._repr_mimebundle_(), self.timeline.span[1]
        said = " · ".join(filter(None, [self._said, self._ending(False)]))
        film["text/html"] = panel(recent(self.timeline, end, math.inf), said) + film["text/html"]
        self._display.update(film, raw=True)


def recent(timeline: Timeline, now: float, window_s: float = WINDOW_S) -> dict[str, Any]:
    """What the `window_s` seconds before `now` (on the engine's clock) were spent on; shares 0 to 1, None if unknown.

    busy: time inside steps; useful_slots: slots that computed a useful token, weighted by time, of all slots and all of
    the window; useful_tokens: of the tokens that the device computed; gpu_*: the newest sample; with an
    infinite window the mean of all, and the most memory.
    """
    since = max(now - window_s, timeline.span[0])
    span = now - since
    slots = timeline.num_slots
    busy = working = useful = computed = 0.0
    for step in reversed(timeline.steps):
        if step.end <= since:
            break
        inside = min(step.end, now) - max(step.start, since)
        busy += inside
        working += inside * sum(row.num_tokens > 0 for row in step.rows)
        useful += step.num_useful_tokens
        computed += step.num_computed_tokens
    live = [r.token_times for r in timeline.requests.values() if r.finish_time is None or r.finish_time > since]
    tokens = sum(len(times) - bisect_right(times, since) for times in live)
    last = timeline.steps[-1] if timeline.steps else None
    blocks = last.num_blocks if last else 0
    samples = timeline.device_samples if window_s == math.inf else timeline.device_samples[-1:]
    busy_gpu, memory, power = ([v for v in values if v is not None] for values in list(zip(*samples))[1:] or [()] * 3)
    return {
        "clock": timeline.clock,
        "time_s": now,
        "window_s": window_s,
        "output_tokens_per_s": tokens / span if span > 0 else None,
        "waiting": last.num_waiting if last else 0,
        "running": len(last.rows) if last else 0,
        "slots": slots,
        "kv_blocks": (last.kv_used_blocks, blocks) if last else (0, 0),
        "busy": busy / span if span > 0 else None,
        "useful_slots": working / (slots * span) if span > 0 else None,
        "useful_tokens": useful / computed if computed else None,
        "gpu_busy": sum(busy_gpu) / len(busy_gpu) if busy_gpu else None,
        "gpu_memory_gib": max(memory) / 2**30 if memory else None,
        "gpu_power_w": sum(power) / len(power) if power else None,
    }


def panel(facts: dict[str, Any], said: str = "") -> str:
    """HTML: a row of numbers, and bars that set what a monitor calls busy beside what was of use."""
    used, blocks = facts["kv_blocks"]
    numbers = [f"{facts['time_s']:.1f} s", f"{_number(facts['output_tokens_per_s'])} output tokens/s"]
    is_whole = facts["window_s"] == math.inf
    if not is_whole:
        numbers += [
            f"{facts['running']} of {facts['slots']} slots held",
            f"{facts['waiting']} waiting",
            f"{used:,} of {blocks:,} KV blocks",
        ]
    if facts["gpu_memory_gib"] is not None:
        numbers.append(f"GPU memory {facts['gpu_memory_gib']:.1f} GiB")
    if facts["gpu_power_w"] is not None:
        numbers.append(f"{facts['gpu_power_w']:.0f} W")
    bars = [("busy: a step was running", facts["busy"], OKABE_ITO["vermillion"])]
    if facts["gpu_busy"] is not None:
        bars.append(("busy: any kernel at all (nvidia-smi)", facts["gpu_busy"], OKABE_ITO["vermillion"]))
    bars += [
        ("useful: slots × seconds that made a token of use", facts["useful_slots"], OKABE_ITO["bluish green"]),
        ("useful: of the tokens computed", facts["useful_tokens"], OKABE_ITO["bluish green"]),
    ]
    rows = "".join(_bar(*bar) for bar in bars)
    when = "the whole run" if is_whole else f"the last {facts['window_s']:g} seconds"
    ending = f"<div><b>{html.escape(said)}</b></div>" if said else ""
    table = f"<table style='border-spacing: 0.4em 0' aria-label='{when}'>{rows}</table>"
    return (
        f"<div style='line-height: 1.5'><div>{facts['clock']} · {' · '.join(numbers)}</div>"
        f"<div>{when}:</div>{table}{ending}</div>"
    )


def _bar(label: str, share: float | None, colour: str) -> str:
    percent = None if share is None else round(100 * min(share, 1.0))
    told = "no sample" if percent is None else f"{percent} %"
    return (
        f"<tr><td>{label}</td><td><div style='width: 16em; border: 1px solid #888'>"
        f"<div style='width: {percent or 0}%; height: 0.8em; background: {colour}'></div></div></td>"
        f"<td style='text-align: right'>{told}</td></tr>"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
