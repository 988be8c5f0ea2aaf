"""The process of ``pdjax serve``: from checked flags to a served port, and from a signal to its end.

Must never serve before the node's programs are compiled, and must never return while a thread of a library could
hold the process (facts/transfer row 16).
"""

from __future__ import annotations

import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from pdjax.core.errors import ConfigError
from pdjax.engine.bootstrap.httpd import HttpThread, bind, url_of
from pdjax.engine.bootstrap.server import HTTPBootstrapServer
from pdjax.engine.descriptors import raise_descriptor_limit
from pdjax.engine.jax_transfer.process import leave, prepare_process
from pdjax.serve.app import build_app, protected
from pdjax.serve.args import ServeArgs
from pdjax.serve.end_request import ALIVE_POLL_S, EndRequest
from pdjax.serve.ending import Failure, Patience, end
from pdjax.serve.health import PeerAccess
from pdjax.serve.loading import Model, load
from pdjax.serve.log import ServerLog, take_over
from pdjax.serve.node import Node
from pdjax.serve.ready import print_ready
from pdjax.serve.router_member import RouterMember
from pdjax.serve.spans import Spans, check_extra, make_spans
from pdjax.serve.watchdog import Watchdog

log = logging.getLogger(__name__)

LOADED_POLL_S = 0.2


def run_server(args: ServeArgs) -> NoReturn:
    """The process of ``pdjax serve``. Raises ConfigError before it has any thread; later it prints it itself.

    Exit codes: 0 asked to end, 1 something has died, 2 it cannot be started like this.
    """
    args.check()
    server_log = ServerLog(form=args.log_format, level=args.log_level)
    take_over(server_log)
    if args.otlp_endpoint:
        check_extra()
    prepare_process()
    raise_descriptor_limit()
    request = EndRequest()
    request.listen()
    try:
        _serve(args, request, server_log)
    # Threads of libraries run: an exit through the interpreter's teardown could crash (facts/transfer row 16).
    except ConfigError as error:
        print(f"pdjax: {error}", file=sys.stderr)
        leave(2)
    except BaseException:
        log.exception("this process ends: its main thread has met an error")
        leave(1)


def _serve(args: ServeArgs, request: EndRequest, server_log: ServerLog) -> NoReturn:
    sock = bind(args.host, args.port)
    bootstrap = None
    if args.with_bootstrap:
        bootstrap = HTTPBootstrapServer(
            args.host, args.bootstrap_port, args.settings.heartbeat_ttl_s, door=args.door, token=args.token()
        )
        bootstrap.start()
        args = args.at_registry(args.host, bootstrap.port)
    url = url_of(sock, args.door.scheme)
    server_log.event("loading", model=args.model, url=url)  # it takes a while, and an operator waits
    model = _load(args, request)
    if model is None:
        _leave_early(request, server_log, bootstrap)
    node = Node(args, model, url, server_log, on_drain=lambda: request.ask("POST /drain"))
    server_log.event("compiling", instance_id=node.instance_id)
    node.start()
    while not node.loaded(LOADED_POLL_S):
        if request.asked:
            _leave_early(request, server_log, bootstrap)
    spans = _spans(args, node)
    app = build_app(
        node,
        log=server_log,
        spans=spans,
        health_timeout_s=args.health_timeout_s,
        peers=PeerAccess(args.api_key(), args.believed()),
    )
    counters = app.state.desk.counters
    http = HttpThread(protected(app, args.api_key()), sock, "http", door=args.door, counters=counters)
    http.start()
    node.announce()
    server_log.event("ready", url=url, role=node.role, instance_id=node.instance_id, epoch=str(node.epoch))
    print_ready(
        url=url,
        role=node.role,
        instance_id=node.instance_id,
        bootstrap=args.registry_url,
    )
    node.router = _router_member(args, node, url, server_log)
    node.router.start()
    node.watchdog = Watchdog(node, server_log, args.watchdog_timeout_s)
    failure = Failure(node, http, bootstrap)
    while not request.asked and not failure.seen():
        request.wait(ALIVE_POLL_S)
        node.watchdog.look(time.monotonic())
    code = end(node, http, request, failure, server_log, Patience(args.drain_limit_s, args.drain_linger_s))
    if spans is not None:
        spans.close()
    if bootstrap is not None:
        bootstrap.stop()
    leave(code)


def _load(args: ServeArgs, request: EndRequest) -> Model | None:
    """On a thread of its own, so that this one hears who asks for the end. None: somebody has. Raises what load does."""
    loading = ThreadPoolExecutor(1, "loader").submit(load, args)
    loading.add_done_callback(lambda _: request.wake())
    while not loading.done() and not request.asked:
        request.wait(ALIVE_POLL_S)
    return None if request.asked else loading.result()


def _leave_early(
    request: EndRequest, server_log: ServerLog, bootstrap: HTTPBootstrapServer | None
) -> NoReturn:
    """Nobody knows the node yet, and nothing is to be drained; but the registry may be answering others."""
    if bootstrap is not None:
        bootstrap.stop()
    server_log.event("ended", reason=request.by)
    leave(0)


def _router_member(args: ServeArgs, node: Node, url: str, server_log: ServerLog) -> RouterMember:
    return RouterMember(
        args.routers,
        url=url,
        role=node.role,
        bootstrap_port=node.bootstrap_port,
        ready=node.ready,
        log=server_log,
        interval_s=args.router_check_interval_s,
        key=args.router_key(),
    )


def _spans(args: ServeArgs, node: Node) -> Spans | None:
    if not args.otlp_endpoint:
        return None
    return make_spans(args.otlp_endpoint, role=node.role, instance_id=node.instance_id, model=node.model_name)
