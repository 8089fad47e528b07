"""The engine behind OpenAI's HTTP interface: one engine a model, each in its own thread, and a router.

clients        event loop, one thread                      a model's engine, one thread each
───────────    ────────────────────────────────────────    ──────────────────────────────────────────
POST body ───► bodies ► protocol ► asking ─── submit ───► │ between two steps: let in, or refuse
               (key, limits, JSON, tokens)                │ plan ► run ► sample, again and again
◄─── events    streaming ◄ answering ◄── once a step ──── │ outputs of everybody in the batch
hangs up ────► streaming ────────────────── abort ──────► │ between two steps: its blocks are free

A file for each arrow's end: connections (how slow a client may be), bodies, protocol, asking, host (the two arrows
between the threads), answering, streaming; keys and metrics beside them; app joins them and server runs them.
"""
