"""Pictures of runs, drawn from timelines alone."""

from .plots import describe, plot_comparison, plot_slots, slots_text

__all__ = ["describe", "plot_comparison", "plot_slots", "slots_text"]
