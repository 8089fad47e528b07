"""What this machine's memory and arithmetic give, in a process of its own: `python -m minibatcher.bench.rates IN OUT`.

IN is JSON: {"dtype", "threads", "seconds"}; OUT gets {"answer": {"bandwidth" (bytes/s), "flops" (FLOP/s), "source"}}.
"""

import json
import sys
from pathlib import Path

import torch

from ..measure import measure_device


def main(question_file: str, answer_file: str) -> None:
    question = json.loads(Path(question_file).read_text(encoding="utf-8"))
    torch.set_num_threads(question["threads"])
    # A library may read one precision's weights slower than memory delivers: the bound takes the best that was seen.
    dtypes = tuple(dict.fromkeys(("float32", question["dtype"])))
    device = measure_device("cpu", dtypes=dtypes, seconds=question["seconds"])
    rates = {"bandwidth": device.bandwidth, "flops": device.rate(question["dtype"]), "source": device.source}
    Path(answer_file).write_text(json.dumps({"answer": rates}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
