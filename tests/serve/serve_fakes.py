"""A scripted engine and a byte tokenizer: what the HTTP layer is tested against."""

import json
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from pdjax.core.errors import PDError
from pdjax.engine.ports import LookupDone
from pdjax.model.tokenizer import Detokenizer
from pdjax.sched.request import Failure, Finish, Output
from pdjax.serve.numbers import Numbers

EOS = 256
VOCAB = 257
WAIT_S = 60.0
PD = {"bootstrap_host": "127.0.0.1", "bootstrap_port": None, "bootstrap_room": 5}


class ByteTokenizer:
    """One token a byte; 256 ends a text and is no text."""

    eos_ids = frozenset([EOS])

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=True):
        if not skip_special_tokens and EOS in ids:
            at = ids.index(EOS)
            return self.decode(ids[:at]) + "<eos>" + self.decode(ids[at + 1 :], False)
        return bytes(i for i in ids if i < EOS).decode(errors="replace")

    def encode_chat(self, messages):
        if messages[0]["role"] == "nobody":
            raise ValueError("the chat template refuses the messages: nobody")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def detokenizer(self, skip_special_tokens=True):
        return Detokenizer(self, skip_special_tokens)

    def json_grammar(self, schema):
        if "wrong" in schema:
            raise ValueError("cannot be followed: wrong")
        return schema


def output(ids, finish=None):
    """As every engine's: with a log-probability and a list of the likeliest for each token."""
    return Output(tuple(ids), (-0.5,) * len(ids), ((),) * len(ids), finish=finish)


def text_outputs(text, finish="stop", step=1):
    """One output for each ``step`` bytes, then the end."""
    ids = list(text.encode())
    pieces = [ids[i : i + step] for i in range(0, len(ids), step)]
    if finish == "stop":
        return [*map(output, pieces), output([EOS], Finish("stop", matched=EOS))]
    last = pieces.pop()
    return [*map(output, pieces), output(last, Finish(finish))]


def echo(request):
    """The prompt back, one byte at a time."""
    return text_outputs(bytes(request.prompt_ids).decode())


def failed(status, reason="peer_lost", message="the peer is gone"):
    return [Output(failure=Failure(status, reason, message))]


@dataclass
class FakeEngine:
    """Answers each request with ``script(request)``, on a thread of its own as a scheduler would.

    An Ellipsis in a script is a gate: it waits for ``release``. An abort during a gate ends the request.
    """

    role: str = "null"
    script: object = staticmethod(lambda request: text_outputs("hello"))
    context_length: int = 512
    vocab_size: int = VOCAB
    model_name: str = "fake-model"
    bootstrap_port: int | None = 8998
    model_info: dict = field(default_factory=lambda: {"model_type": "llama", "architectures": ["X"]})
    dead: str | None = None
    is_ready: bool = True
    draining: bool = False
    serving_url: str = "http://127.0.0.1:1"
    others: tuple = ()
    n_passed: int = 0
    disable_radix_cache: bool = False
    can_flush: bool = True
    counted: Numbers = field(default_factory=Numbers)

    def __post_init__(self):
        self.tokenizer = ByteTokenizer()
        self.requests, self.aborted, self.flush_waits = [], [], []
        self.pauses, self.refused_rooms = [], []
        self.hand_offs = {}  # rid -> rooms that live though their answer is out
        self.refuse = None
        self.changed = threading.Condition()
        self._gates = {}
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request):
        error = self.refuse and self.refuse(request)
        if error:
            raise error
        self._inbox.put((request, iter(list(self.script(request)))))
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    def abort(self, rid):
        self._abort(rid, lambda request: request.rid == rid)
        return self.hand_offs.get(rid, 0)

    def abort_all(self):
        self._abort("all", lambda request: True)
        return sum(self.hand_offs.values())

    def abort_request(self, request):
        self._abort(request.rid, lambda other: other is request)

    def _abort(self, said, meant):
        with self.changed:
            self.aborted.append(said)
            self.changed.notify_all()
        for name, (request, _) in list(self._gates.items()):
            if meant(request):
                self._inbox.put((name, None))

    def release(self):
        """Let every request that waits at a gate go on."""
        for request, rest in list(self._gates.values()):
            self._inbox.put((request, rest))

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), (self.requests, self.aborted)

    def _run(self):
        while (item := self._inbox.get()) is not None:
            request, outputs = item
            if outputs is None:
                gated = self._gates.pop(request, None)
                if gated:
                    gated[0].sink(Output(finish=Finish("abort", message="aborted")))
                continue
            self._gates.pop(id(request), None)
            for output in outputs:
                if output is Ellipsis:
                    with self.changed:
                        self._gates[id(request)] = (request, outputs)
                        self.changed.notify_all()
                    break
                request.sink(output)

    def gated(self):
        return len(self._gates)

    def info(self):
        return {"num_running": 1, "num_waiting": 2, "num_tokens": 30, "free_pages": 4}

    def numbers(self):
        return self.counted

    def rooms(self, limit, room):
        return {"role": self.role, "rooms": [], "asked": [limit, room]}

    def ready(self):
        return self.is_ready

    def passed(self):
        return self.n_passed

    def peers(self):
        answer = Future()
        answer.set_result(LookupDone(0, self.others, {}, None))
        return answer

    def ask_to_drain(self):
        self.draining, self.is_ready = True, False

    def failed(self):
        return self.dead

    def pause(self, paused):
        self.pauses.append(paused)
        answer = Future()
        answer.set_result(None)
        return answer

    def refuse_rooms(self, rooms):
        self.refused_rooms += rooms

    def flush_cache(self, timeout_s):
        self.flush_waits.append(timeout_s)
        answer = Future()
        answer.set_result(self.can_flush)
        return answer

    def close(self):
        self._inbox.put(None)
        self._thread.join(WAIT_S)


def duplicate(request):
    return PDError("room is live", reason="duplicate_room", status=400, room=request.room)


def frames(answer):
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
