"""The engines that can be measured side by side, one module each.

A peer has TITLE (for tables); missing(settings): a sentence why it can't run here, or None; serve(job): loads the model,
serves job.warm_up, then replays job.requests; and, where it needs any, environment(job): variables for its process.
Peers run in a fresh process, perhaps under another environment's interpreter: they import their engine only in `serve`,
and nothing of minibatcher beyond `bench`.
"""

NAMES = ("minibatcher", "transformers_generate", "transformers_continuous", "llama_cpp", "vllm", "nano_vllm")
