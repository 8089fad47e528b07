"""What `--help` says of the named workloads: read from the functions that draw them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable

from ..workload import ARRIVALS, profile, profiles
from ..workload.generators import GENERATORS
from ..workload.mixes import MIXES

COMMON = ("seed", "request_rate", "arrivals", "arrival_cv")  # told once for all


def workload_help(width: int = 96) -> str:
    """Each named workload with its parameters, as they are unless told otherwise, and what it is."""
    lines = [
        "Named workloads, with the parameters that --workload may set after a colon, as in tenants:flood=10 or",
        "shared-prefix:turns=2,arrivals=gamma,arrival_cv=2,request_rate=4. Unless told otherwise they are:",
    ]
    drawn = {name: (draw, _parameters(draw)) for name, draw in (GENERATORS | MIXES).items()}
    for name, (draw, own) in [*drawn.items(), (", ".join(profiles()), (profile, ""))]:
        spec = textwrap.wrap(f"{name}:{own}" if own else name, width, initial_indent="  ", subsequent_indent="    ")
        lines += [line.replace(", ", ",") for line in spec] if own else spec  # blanks were for the wrapping alone
        about = (inspect.getdoc(draw) or "").partition("\n\n")[0].replace("`", "")
        lines += textwrap.wrap(about, width, initial_indent="      ", subsequent_indent="      ")
    lines.append(f"All take request_rate, arrivals ({', '.join(ARRIVALS)}; profiles also trace) and arrival_cv.")
    return "\n".join(lines)


def _parameters(draw: Callable) -> str:
    """num_tenants=4, flood=1, …: without the blanks it can be given to --workload as it is."""
    own = {
        key: parameter.default
        for key, parameter in inspect.signature(draw).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in COMMON
    }
    return ", ".join(f"{key}={value:g}" for key, value in own.items())
