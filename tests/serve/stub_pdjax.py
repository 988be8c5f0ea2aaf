"""``pdjax`` with a scripted engine in place of a model: the real command line, registry, HTTP layer and children.

--model names how it behaves: "stub" serves, "refuses" is a wrong setting, "ends" stops by itself once it is asked,
"deaf" ignores SIGTERM.
"""

import os
import signal
import sys
import threading
import time
import types

from serve_fakes import FakeEngine, text_outputs

from pdjax.core.errors import ConfigError
from pdjax.core.pools import Fingerprint, KVArgs
from pdjax.engine.bootstrap.client import HttpRegistryClient
from pdjax.engine.bootstrap.httpd import HttpThread, bind, url_of
from pdjax.engine.bootstrap.registration import registration
from pdjax.sched.request import Finish, Output
from pdjax.serve import cli, local
from pdjax.serve.app import build_app
from pdjax.serve.ready import print_ready

FP = Fingerprint(1, "m", "w", "float32", 16, 2, 1, 64, "paged", "1x1", 4 << 20, 1, "0.10.2")


def script(args):
    def run(request):
        if args.model == "ends" and args.instance_id == "decode-0":
            os._exit(7)
        if args.disaggregation_mode == "prefill":
            return [Output((104,), finish=Finish("length"))]
        return text_outputs("hello " + args.instance_id)

    return run


def run_server(args):
    if args.model == "refuses" and args.disaggregation_mode == "decode":
        raise ConfigError("this model is a wrong setting")
    sock = bind(args.host, args.port)
    url = url_of(sock)
    engine = FakeEngine(
        role=args.disaggregation_mode, script=script(args), bootstrap_port=args.bootstrap_port
    )
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if args.model == "deaf" else done.set())
    http = HttpThread(build_app(engine), sock, "http")
    http.start()
    if args.disaggregation_mode != "null":
        client = HttpRegistryClient(args.bootstrap_host, args.bootstrap_port, heartbeat_interval_s=0.1)
        client.start(lambda answer: None)
        kv = KVArgs([], args.page_size, FP, args.instance_id, url)
        client.announce(registration(kv, args.disaggregation_mode, time.time_ns(), zmq_addr="127.0.0.1:1"))
        type(engine).ready = lambda self: bool(client.membership.compatible)
    print(f"chips {os.environ.get('TPU_VISIBLE_CHIPS')}", flush=True)
    print_ready(url=url, role=engine.role, instance_id=args.instance_id)
    done.wait()
    os._exit(0)


if __name__ == "__main__":
    sys.modules["pdjax.serve.process"] = types.SimpleNamespace(run_server=run_server)
    local.PROGRAM = (sys.executable, __file__)
    cli.main()
