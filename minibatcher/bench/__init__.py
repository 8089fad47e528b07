"""One workload replayed on several servers of the same model, side by side: ``minibatcher bench``."""
