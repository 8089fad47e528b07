"""`minibatcher serve`: the engine behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import time

from ..errors import MissingDependency
from ..scheduling import STRATEGIES
from .options import (
    add_engine_options,
    add_model_options,
    add_speed_options,
    names_of,
    positive_int,
    positive_number,
    whole_number,
)
from .serve_engines import (
    KEY_VARIABLE,
    api_keys,
    model_names,
    record,
    save_timeline,
    say,
    served_engine_options,
    special_ids,
    timeline_files,
    warm_engine,
)

DESCRIPTION = """\
Serve a model to any client of OpenAI's API, until Ctrl-C.

  minibatcher serve
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"model": "bard", "prompt": "ROMEO:", "max_tokens": 40, "stream": true}'

The same in Python, with the openai package:
  client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  client.chat.completions.create(model="bard", messages=[{"role": "user", "content": "Who art thou?"}])

The same workload as `minibatcher compare`, over HTTP, and both in one table:
  minibatcher replay azure-conv --base-url http://127.0.0.1:8000/v1 --json replay.json
  minibatcher compare --workload azure-conv --strategies chunked --with replay.json

What it does meanwhile: /metrics, under the names that vLLM's dashboards ask for; /health; /openapi.json.

A file of API keys makes each key a tenant, with bounds of its own on each model; several share an engine fairly:
  [keys.alice]
  key = "secret"               # or key_sha256 = "64 hex digits"
  tokens_per_s = 500           # prompt + max_tokens; what was not generated is given back
  burst_tokens = 20000         # so many at once (default: what a minute brings)
Also requests_per_s, burst_requests, max_waiting_requests (default: an equal part of the queue), priority.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model to clients of OpenAI's API",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # --enable-prefix-caching is on here unless it is switched off
    )
    where = parser.add_argument_group("where, and to whom")
    where.add_argument(
        "--host", default="127.0.0.1", help="address to listen on: 0.0.0.0 is all of this machine (default: 127.0.0.1)"
    )
    where.add_argument("--port", type=whole_number(0, 65_535), default=8000, help="0 takes a free one (default: 8000)")
    keys = where.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-keys",
        metavar="FILE",
        help="TOML with a table for each key (see above); several keys are served by --ordering fair-share by default",
    )
    keys.add_argument(
        "--api-key",
        metavar="KEY",
        help="the one key that clients must send; users of this machine see it in the list of processes, so better set "
        f"the variable {KEY_VARIABLE}",
    )
    add_model_options(parser, several=True)
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model (default: as --model has it); repeatable, in the order of --model",
    )
    parser.add_argument("--strategy", default="chunked", help=f"one of {', '.join(STRATEGIES)} (default: chunked)")
    add_engine_options(parser, several=False)
    parser.add_argument(
        "--enable-prefix-caching",
        type=names_of("setting", ("off", "on"), several=False),
        metavar="off|on",
        help="share the KV blocks of prompts that begin alike (default: on with continuous and chunked)",
    )
    add_speed_options(parser)
    bounds = parser.add_argument_group("what clients may take")
    bounds.add_argument(
        "--max-waiting-requests",
        type=positive_int,
        default=256,
        help="who finds so many waiting is told to come back later, with 429 (default: 256)",
    )
    bounds.add_argument(
        "--max-waiting-tokens", type=positive_int, help="the same for prompt + max_tokens of all that wait"
    )
    bounds.add_argument(
        "--max-body-bytes",
        type=positive_int,
        default=1 << 20,
        help="longest body; reading a larger one holds up all others longer (default: 1048576, 1 MiB)",
    )
    bounds.add_argument(
        "--body-timeout-s", type=positive_number, default=30.0, help="time for a body to arrive (default: 30)"
    )
    bounds.add_argument(
        "--header-timeout-s", type=positive_number, default=10.0, help="time for a request's head (default: 10)"
    )
    bounds.add_argument(
        "--keep-alive-s", type=positive_number, default=30.0, help="idle time between two requests (default: 30)"
    )
    bounds.add_argument(
        "--max-connections", type=positive_int, default=1000, help="open at once; others get 503 (default: 1000)"
    )
    end = parser.add_argument_group("record and end")
    end.add_argument("--timeline", metavar="FILE", help="keep every step and request, and save them at the end (JSON)")
    end.add_argument("--access-log", action="store_true", help="a line on standard error for each request")
    end.add_argument(
        "--shutdown-timeout-s",
        type=positive_number,
        default=30.0,
        help="how long requests may go on after Ctrl-C or SIGTERM; what is left is aborted (default: 30)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        from ..serve.app import create_app
        from ..serve.connections import Bounds
        from ..serve.host import EngineHost
        from ..serve.listening import is_loopback, listen_on, url_of
        from ..serve.metrics import ServerMetrics
        from ..serve.server import run_server
        from ..serve.settings import ServeSettings
    except MissingDependency:
        raise
    except ImportError as error:
        raise MissingDependency(f"serving needs {error.name}: pip install 'minibatcher[serve]'") from error
    names = model_names(args)
    files = timeline_files(args.timeline, list(names))
    keys = api_keys(args)
    options = served_engine_options(args, keys)
    listener = listen_on(args.host, args.port)  # before the models are loaded, which may take minutes
    with listener:
        if keys is None and not is_loopback(listener):
            say(f"warning: anybody who reaches {args.host} may use this server; --api-key would keep others out")
        engines = {
            name: warm_engine(args, model, options, (i + 1) / len(names))
            for i, (name, model) in enumerate(names.items())
        }
        metrics = ServerMetrics(longest=max(engine.max_model_len for engine in engines.values()))
        for name, engine in engines.items():
            record(engine, metrics, name, keep=args.timeline is not None)
        created = int(time.time())
        hosts = {name: EngineHost(name, engine, created, special_ids(engine)) for name, engine in engines.items()}
        settings = ServeSettings(
            max_body_bytes=args.max_body_bytes, body_timeout_s=args.body_timeout_s, keys=keys, metrics=metrics
        )
        url = url_of(listener)

        def ready() -> None:
            say(f"/health, /metrics and /openapi.json are at {url}")
            print(f"minibatcher serves {', '.join(hosts)} at {url}/v1 (Ctrl-C stops)", flush=True)

        failure = run_server(
            create_app(hosts, settings),
            list(hosts.values()),
            listener,
            bounds=Bounds(
                head_timeout_s=args.header_timeout_s,
                keep_alive_s=args.keep_alive_s,
                max_connections=args.max_connections,
            ),
            shutdown_timeout_s=args.shutdown_timeout_s,
            access_log=args.access_log,
            ready=ready,
            say=say,
        )
    saved = [save_timeline(engines[name], name, file) for name, file in files.items()]
    if failure is not None:
        say(failure)
        return 1
    return 0 if all(saved) else 2
