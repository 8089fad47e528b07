"""A workload sent at its recorded times to any server with OpenAI's interface, and measured at the client."""
