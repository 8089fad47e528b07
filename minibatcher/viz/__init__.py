"""Pictures of runs, still, moving and live, drawn from timelines alone."""

from .check import check_figure
from .gantt import plot_gantt
from .kv import plot_kv_occupancy
from .latency import plot_latency_cdf, plot_latency_sweep
from .live import LiveView
from .memory_map import plot_memory_map
from .memory_view import memory_view
from .padding import padding_view, plot_padding
from .plots import describe, plot_comparison, plot_slots, slots_text
from .roofline import plot_roofline
from .roofline_view import roofline_view
from .rooms import plot_rooms
from .slots import animate
from .throughput import plot_batch_throughput, plot_strategy_spread

__all__ = [
    "LiveView",
    "animate",
    "check_figure",
    "describe",
    "memory_view",
    "padding_view",
    "plot_batch_throughput",
    "plot_comparison",
    "plot_gantt",
    "plot_kv_occupancy",
    "plot_latency_cdf",
    "plot_latency_sweep",
    "plot_memory_map",
    "plot_padding",
    "plot_roofline",
    "plot_rooms",
    "plot_slots",
    "plot_strategy_spread",
    "roofline_view",
    "slots_text",
]
