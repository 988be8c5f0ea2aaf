"""The process of ``pdjax serve``: from checked flags to a served port, and from a signal to its end.

Must never serve before the node's programs are compiled, and must never return while a thread of a library could
hold the process (facts/transfer row 16).
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from pdjax.engine.bootstrap.httpd import HttpThread, bind, url_of
from pdjax.engine.bootstrap.server import HTTPBootstrapServer
from pdjax.engine.jax_transfer.process import leave, prepare_process
from pdjax.serve.app import build_app
from pdjax.serve.args import ServeArgs
from pdjax.serve.log import ServerLog, take_over
from pdjax.serve.node import Node, load
from pdjax.serve.ready import print_ready
from pdjax.serve.router_member import RouterMember
from pdjax.serve.spans import Spans, check_extra, make_spans

log = logging.getLogger(__name__)

LOADED_POLL_S = 0.2


def run_server(args: ServeArgs) -> int:
    """The process of ``pdjax serve``: returns never, or raises ConfigError before it serves."""
    args.check()
    server_log = ServerLog(form=args.log_format, level=args.log_level)
    take_over(server_log)
    if args.otlp_endpoint:
        check_extra()
    prepare_process()
    sock = bind(args.host, args.port)
    bootstrap = None
    if args.with_bootstrap:
        bootstrap = HTTPBootstrapServer(args.host, args.bootstrap_port, args.settings.heartbeat_ttl_s)
        bootstrap.start()
        args = args.at_registry(args.host, bootstrap.port)
    url = url_of(sock)
    server_log.event("loading", model=args.model, url=url)  # it takes a while, and an operator waits
    node = Node(args, load(args), url, server_log)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: _on_signal(done, signum, frame))
    server_log.event("compiling", instance_id=node.instance_id)
    node.start()
    while not node.loaded(LOADED_POLL_S):
        if done.is_set():  # asked to end while it compiles: nobody knows us yet
            leave(0)
    spans = _spans(args, node)
    http = HttpThread(build_app(node, log=server_log, spans=spans), sock, "http")
    http.start()
    node.announce()
    server_log.event("ready", url=url, role=node.role, instance_id=node.instance_id, epoch=str(node.epoch))
    print_ready(
        url=url,
        role=node.role,
        instance_id=node.instance_id,
        bootstrap=f"http://{args.bootstrap_host}:{args.bootstrap_port}" if args.bootstrap_host else "",
    )
    node.router = RouterMember(
        args.routers,
        url=url,
        role=node.role,
        bootstrap_port=node.bootstrap_port,
        ready=node.ready,
        log=server_log,
        interval_s=args.router_check_interval_s,
        key=args.router_key(),
    )
    node.router.start()
    while not done.wait(1.0):
        if not http.alive:
            log.error("the HTTP server has ended")
            break
        dead = node.failed()
        if dead is not None:  # nobody would end the requests that wait here (V1): leave, and be started again
            log.error("this process ends: %s", dead)
            break
    server_log.event("draining", instance_id=node.instance_id, reason="signal" if done.is_set() else "failed")
    node.drain()
    node.router.leave()
    http.stop()
    node.stop()
    if spans is not None:
        spans.close()
    if bootstrap is not None:
        bootstrap.stop()
    leave(0 if done.is_set() else 1)


def _spans(args: ServeArgs, node: Node) -> Spans | None:
    if not args.otlp_endpoint:
        return None
    return make_spans(args.otlp_endpoint, role=node.role, instance_id=node.instance_id, model=node.model_name)


def _on_signal(done: threading.Event, signum: int, frame: FrameType | None) -> None:
    if done.is_set():  # a second one: now
        leave(128 + signum)
    done.set()
