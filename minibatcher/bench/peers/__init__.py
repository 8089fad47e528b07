"""The engines that can be measured side by side, one module each.

A peer has TITLE (for tables); missing(settings): a sentence why it can't run here, or None; serve(job): loads the
model, serves job.warm_up, then replays job.requests; and, where it needs any, environment(job): variables for the
process that serves. All of it runs in processes of its own, perhaps under another environment's interpreter: an engine
is imported in `serve` only, and nothing of minibatcher beyond `bench`.
"""

NAMES = ("minibatcher", "transformers_generate", "transformers_continuous", "llama_cpp", "vllm", "nano_vllm")
