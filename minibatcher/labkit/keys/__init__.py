"""A right answer to each exercise, and wrong ones with what to tell who gives them, one module a lab."""
