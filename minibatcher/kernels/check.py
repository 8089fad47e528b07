"""Every kernel against the float64 reference, on fresh random inputs: on the GPU, or in Triton's interpreter."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

from ..errors import DeviceError
from .child import failure

# What the engine runs comes first, since time may run out.
KERNELS = (
    "store_kv",
    "decode_attention",
    "ragged_attention",
    "naive_attention",
    "tiled_attention",
    "paged_attention",
)


def rows(device: str = "cpu", seed: int | None = None, most_cases: int | None = None) -> Iterator[dict[str, Any]]:
    """A row for each kernel, dtype and case: kernel, dtype, shape, error, tolerance, ok; `failure` where it raised.

    The first row is {"total": how many follow, "seed": the inputs'}. seed: None draws one. most_cases: of each kernel.
    error: the largest of |out - reference| / (1 + |reference|), None where it is infinite (NaN in the output).
    """
    import torch

    from ..attention.triton_support import interpret, why_not

    if torch.device(device).type == "cpu":
        interpret()
    elif torch.device(device).index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current one
    dtypes = [torch.float32, torch.float16]
    if why_not(torch.device(device), torch.bfloat16) is None:
        dtypes.append(torch.bfloat16)
    if (reason := why_not(torch.device(device), torch.float32)) is not None:
        raise DeviceError(reason)

    from .cases import TOLERANCES, launchers, random_case, run_case

    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    todo = [
        (kernel, dtype, shape)
        for kernel, shapes in cases(device).items()
        for dtype in dtypes
        for shape in shapes[:most_cases]
    ]
    yield {"total": len(todo), "seed": seed}
    launch = launchers()
    for kernel, dtype, shape in todo:
        begun = time.perf_counter()
        short = str(dtype).removeprefix("torch.")
        row = {"kernel": kernel, "dtype": short, "shape": str(shape), "seed": seed, "tolerance": TOLERANCES[dtype]}
        try:
            error = run_case(kernel, launch[kernel], random_case(shape, dtype, device, seed))
        except Exception as problem:
            yield {**row, "error": None, "ok": False, "failure": failure(problem)}
            continue
        ok = error <= TOLERANCES[dtype]
        yield {
            **row,
            "error": error if math.isfinite(error) else None,
            "ok": ok,
            "seconds": time.perf_counter() - begun,
        }


def cases(device: str) -> dict[str, tuple]:
    """Shapes by kernel: those of the tests, and on a GPU larger ones, as a model has them."""
    import torch

    from .cases import CASES, Shape

    if torch.device(device).type == "cpu":
        return {kernel: CASES[kernel] for kernel in KERNELS}
    llama, qwen = (32, 8, 128, 16), (14, 2, 64, 32)
    mixed = (
        Shape((512, *[1] * 32, 100), (1500, *range(1000, 1032), 100), *llama),
        Shape((1, 300, 1, 77), (4000, 300, 1, 1077), *qwen),
        Shape((129, 64), (2049, 64), 8, 1, 256, 64),
    )
    decodes = (
        Shape((1,) * 64, tuple(range(1, 4097, 65))[:64], *llama),
        Shape((1,) * 3, (9000, 1, 700), *qwen),
        Shape((1,) * 130, (333,) * 130, 16, 16, 80, 16),
    )
    solo = (Shape((1000,), (1000,), *llama), Shape((333,), (333,), *qwen))
    larger = {
        "store_kv": mixed,
        "decode_attention": decodes,
        "ragged_attention": mixed,
        "naive_attention": solo,
        "tiled_attention": solo,
        "paged_attention": (Shape((512,), (2500,), *llama),),
    }
    return {kernel: (*larger[kernel], *CASES[kernel]) for kernel in KERNELS}


def worst(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kernel and dtype: cases, failed (how many), error (the largest; None: infinite), tolerance,
    first_failure (the row), raised (what the first case that raised said). None: there was none.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["kernel"], row["dtype"]), []).append(row)
    table = []
    for (kernel, dtype), some in groups.items():
        errors = [row["error"] for row in some]
        failed = [row for row in some if not row["ok"]]
        table.append(
            {
                "kernel": kernel,
                "dtype": dtype,
                "cases": len(some),
                "failed": len(failed),
                "error": None if None in errors else max(errors),
                "tolerance": some[0]["tolerance"],
                "first_failure": failed[0] if failed else None,
                "raised": next((row["failure"] for row in failed if "failure" in row), None),
            }
        )
    return table
