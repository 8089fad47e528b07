"""What runs a step's plan: a real model with padding, a real model without, or a cost model in virtual time."""
