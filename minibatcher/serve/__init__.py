"""The engine behind OpenAI's HTTP interface: one engine a model, each in its own thread, and a router."""
