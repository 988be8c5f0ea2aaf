"""An HTTP server that is none of ours: whatever it is asked, it answers with the bytes that it was given."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

END_S = 0.01
PAUSE_S = 0.05  # between two pieces of an answer that trickles


def head(length=None, status=b"200 OK", more=b""):
    stated = b"" if length is None else b"content-length: %d\r\n" % length
    return b"HTTP/1.1 %s\r\n%s%sconnection: close\r\n\r\n" % (status, stated, more)


def answer(body, **more):
    return head(len(body), **more) + body


class Stranger:
    """``reply``: one whole answer as bytes, or an iterable of pieces that may have no end. n_bytes: handed out so far."""

    def __init__(self):
        self.reply, self.n_bytes, self.n_asked = answer(b"{}"), 0, 0
        self._ended = threading.Event()
        stranger = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.rfile.read(int(self.headers.get("content-length", 0)))
                stranger.n_asked += 1
                self.close_connection = True
                reply = stranger.reply
                with contextlib.suppress(OSError):
                    for piece in (reply,) if isinstance(reply, bytes) else reply():
                        self.wfile.write(piece)
                        stranger.n_bytes += len(piece)

            do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_):
                """Who asked has gone away."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.host, self.port = self._server.server_address
        self.url = f"http://{self.host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(END_S,), daemon=True)
        self._thread.start()

    def endless(self):
        """Spaces, as fast as they are read."""
        yield head()
        while not self._ended.is_set():
            yield b" " * 65536

    def trickle(self):
        """A byte now and again: each read is answered in time, and the answer never ends."""
        yield head()
        while not self._ended.wait(PAUSE_S):
            yield b" "

    def slow_head(self):
        yield b"HTTP/1.1 200 OK\r\nx-slow: "
        while not self._ended.wait(PAUSE_S):
            yield b"x"

    def close(self):
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
