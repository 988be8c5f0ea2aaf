"""Ways to break the program on purpose, one thing at a time: each is a context in which it is broken."""

import contextlib
import dataclasses
from collections import deque

from pdjax.core import transitions as t
from pdjax.core.receiver import ReceiverRoom
from pdjax.core.sender import SenderRoom
from pdjax.engine.bootstrap.registry import Registry
from pdjax.engine.rooms import LockedRooms
from pdjax.sched.decode import SchedulerDisaggregationDecodeMixin as DecodeMixin
from pdjax.sim import mutate


def rows(change):
    return mutate.rows_where(change)()


def effects_of(role, event, states=None):
    """Rows of an event get other effects: a function of the old ones."""

    def decorate(change):
        def one(row):
            if row.role != role or event not in row.event.split() or (states and row.states != states):
                return row
            return dataclasses.replace(row, effects=tuple(change(row)))

        return rows(one)

    return decorate


def without(effect, role=None, event=None):
    def change(row):
        if (role is None or row.role == role) and (event is None or event in row.event.split()):
            return dataclasses.replace(row, effects=tuple(e for e in row.effects if e != effect))
        return row

    return rows(change)


def attribute(owner, name, make):
    return mutate.attribute(owner, name, make(owner.__dict__[name]))


def effect(side, name, make):
    return mutate.table_entry(side, "_effects", name, make(side._effects[name]))


def condition(side, name, value):
    return mutate.table_entry(side, "_conditions", name, lambda room, ev: value)


def mistake(name):
    return next(m for m in mutate.mistakes() if m.name == name).patch()


def nothing(old):
    return lambda *args, **kwargs: None


def nobody_late(old):
    return lambda self, now: []


def retarget(role, event, states, to):
    return rows(
        lambda r: (
            dataclasses.replace(r, to=to) if (r.role, r.states) == (role, states) and event in r.event else r
        )
    )


def early_token(old):
    def start(self, seq):
        started = old(self, seq)
        if started:
            self._manager.note("first_token", seq.req.room)
        return started

    return start


def twice_taken(old):
    def alloc(self, n, token):
        pages = old(self, n, token)
        if pages:
            self._free.append(pages[0])
        return pages

    return alloc


def changed_bytes(old):
    def withdraw(self, peer, uuid, life_s):
        server = self._servers.get(peer)
        if server is not None and uuid in server.offers:
            for array in server.offers[uuid].arrays:
                if array is not None:
                    array.flat[0] ^= 1
        old(self, peer, uuid, life_s)

    return withdraw


def raising_once(old):
    def offer(self, peer, uuid, packed):
        raise RuntimeError("no memory for a registration")

    return offer


def other_end(old):
    """The log says one state, the manager keeps another."""

    def handle(self, room, ev, now, digest=""):
        effects, line = old(self, room, ev, now, digest)
        if ev.name == "kv_ready" and room in self.rooms:
            self.rooms[room].state = t.LETTERS["W"]
        return effects, line

    return handle


def forgets_to_count(old):
    def forget(self, room, now):
        before = self.n_early
        old(self, room, now)
        self.n_early = before

    return forget


def without_timer(old):
    return lambda self, ev, now: old(self, ev, now)[1:]


def last_first(old):
    def head(self):
        if self.name != "page_queue" or not len(self):
            return old(self)
        return list(self)[-1]

    return head


def no_pages():
    stack = contextlib.ExitStack()
    stack.enter_context(condition(ReceiverRoom, "pages_taken", True))
    stack.enter_context(
        mutate.attribute(DecodeMixin, "_start_pull", lambda self, seq: pull_without(self, seq))
    )
    return stack


def pull_without(self, seq):
    seq.receiver.receive([1])
    self._move(seq, self.in_flight)
    return True


def no_timers():
    stack = contextlib.ExitStack()
    for name in ("arm_request", "arm_bootstrap"):
        stack.enter_context(effect(ReceiverRoom, name, nothing))
    return stack


def inbox_unread(old):
    def turn(self):
        inbox, self._inbox = self._inbox, deque()
        old(self)
        self._inbox = inbox

    return turn


def no_fingerprints():
    stack = contextlib.ExitStack()
    stack.enter_context(condition(SenderRoom, "foreign_fingerprint", False))
    stack.enter_context(mutate.attribute(Registry, "_judge", staticmethod(lambda asker, seat: None)))
    return stack


def ready_again(row):
    if (row.role, row.states, row.event) != (t.RECEIVER, "W", "ready"):
        return row
    if "note_ready" in row.effects:
        return dataclasses.replace(row, when=())
    return None if row.when == ("!same_uuid",) else row


def deaf_after_rebirth(old):
    def judge(self, frame, my_epoch, now, life_s):
        if self.epoch and frame.epoch > self.epoch:
            return "old_epoch"
        return old(self, frame, my_epoch, now, life_s)

    return judge


def silent_budget(old):
    def free(self, ev, now):
        old(self, ev, now)

    return free


def deaf_to_drain():

    def take(old):
        def leg(self, leg, name, reason):
            draining, self.draining = self.draining, False
            try:
                old(self, leg, name, reason)
            finally:
                self.draining = draining

        return leg

    def claim(old):
        def one(self, leg, ev, known):
            self.draining = True
            return old(self, leg, ev, known)

        return one

    stack = contextlib.ExitStack()
    stack.enter_context(attribute(LockedRooms, "_take_leg", take))
    stack.enter_context(attribute(LockedRooms, "_claim", claim))
    return stack


def always_quiet(old):
    return lambda self, slot, *, quiet: old(self, slot, quiet=True)


def one_memory(old):
    """All slots of a size lie in the same memory."""
    memory = {}

    def staged(arrays, slot):
        slot.arrays = memory.setdefault(slot.n_bytes, arrays)
        return old(arrays, slot)

    return staged
