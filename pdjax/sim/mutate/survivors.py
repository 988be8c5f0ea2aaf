"""Why no property should notice the mutants that survive: one argument each, shared where it is the same sentence.

Each can be checked against the rows it names, or says what checks it. Must never argue by the kind of change alone.
"""

from __future__ import annotations

REASONS = {
    "withdrawn before": "P withdraws what it has registered in the very step in which the room leaves T, and S1 (what is"
    " registered belongs to a live room) is checked in every state of every search. Nothing is left to withdraw here: the"
    " row repeats it as a second line.",
    "its leg has come": "The abort is not quiet or names a registration, so its D has had P's ready, and P's leg came before"
    " that. No late leg is left that the early entry could refuse.",
    "silent first": "D commits only while P answers it: peer silence and R together are less than a lease, and P forgets a room"
    " two leases after its end. A done that finds no record finds no limbo of its attempt.",
    "another life ends it": "Without the row P answers pending or ready. That is an answer of a newer life than D is bound to,"
    " and its frame ends the room on D as peer_lost all the same.",
    "another attempt": "Another request has another attempt: the next two rows (attempt_newer, attempt_older) say the same.",
    "the timer says it": "V10 is checked in every state: P's lease runs exactly where the room is bound or in T, its bootstrap"
    " timer exactly where P is gated and the room is not bound. The condition holds whenever the timer fires.",
    "unbound is quiet": "An abort for a room that is not bound is of a D that was never offered its KV, so it is quiet. The"
    " next row does the same, and its withdraw is of a uuid that was never registered.",
    "counter": "The effect is a counter for operators. No property speaks of counters.",
    "dropped with its record": "The record is dropped in the same step, and its timers with it: the effect clears garbage.",
    "nothing but a name": "The row changes nothing and says nothing. Without it, or where it stands for the default, the message"
    " is STALE, which changes nothing and says nothing either.",
    "over in this step": "The room ends in this very step and every other candidate is out. Being bound only spares a P that a"
    " late look-up shows for the first time an abort of a room that it does not have.",
    "out and told": "The candidate was dropped because it had said failed or had died. It works for nobody; what it may hold in"
    " limbo D has never pulled, and the limbo timer gives it back (V2's bound).",
    "out is out": "newer_life asks for a candidate by itself. Only one that is out differs, and D drops a candidate only when"
    " that life of it has failed the room or is gone: a newer life has no more of it.",
    "only who knows the peer": "The driver tells only rooms that know the peer (ReceiverSide.rooms_of). In B that is a candidate;"
    " and if it is out and so is every other, the room has ended already (V7, checked in every state).",
    "noted means answered": "The driver raises no_candidate only for a room that has noted no candidate (Driver._looked_up), and"
    " a bound room has. The row keeps the table total.",
    "read after rebirth": "The driver ends the rooms of an older life before it reads the messages of the frame that shows the"
    " newer one (Driver._frame, Driver._reborn; the model does the same). No event reaches the row: it is a second line.",
    "a lost room is a newer life": "P says failed(echo 1) to a D that pulls only of a room that it has lost with an earlier life"
    " (no lease ends under a D that renews it: V10), and that life's end reaches D first, in the same frame at the latest.",
    "registered once": "P registers a room once (S4 and S16 are checked at every registration), so only a forged frame names"
    " another uuid. D goes on with the one it has, which fails or lands by itself.",
    "dropped with its server": "The driver drops the peer's server in the same turn (DropPeer, after _peer_down and _reborn): its"
    " pulls settle at once and need no graveyard.",
    "asked by the scheduler": "start is raised by receiver.receive alone, for a room of the page queue, where note_ready has put"
    " it, and with the pages in hand (S17 is checked at every start). The condition holds whenever start is raised.",
    "rebirth is newer": "peer_reborn is raised with the first frame of a newer life. A room can be bound to that life only by a"
    " later frame, so a room that is bound to the peer is bound to an older one.",
    "no notice, no end": "end_notice looks for the notice by itself and finds none.",
    "echo of a quiet abort": "failed(echo 1) answers an abort that said quiet, or says that P has no such room. In the first case"
    " D is quiet, in the second P holds nothing that a notice could give back.",
    "old frames are not read": "A frame of an older life than the newest heard is dropped before its messages are read"
    " (Link.judge; the model does the same), and a notice is of a life that was heard.",
    "uuids are unique": "Another P has minted other uuids (S8 is checked at every registration), so same_uuid holds only for the"
    " bound one.",
    "its notice is open": "A twin says failed(echo 0) only before it has answered D's abort, so that notice is open, and the next"
    " row repeats it.",
    "echo of a lost room": "The bound P says failed(echo 1) to an attempt that has succeeded only when it has lost the room with"
    " an earlier life, and that life's end has ended the notice.",
    "the done's own uuid": "P's done_ack repeats the uuid of the done that it answers, or names its own registration, which is"
    " the one that D has pulled. The attempt fences the rest.",
    "nobody says so": "No event reaches the row: the scheduler tells the manager nothing about a request that ends while it"
    " decodes. The row keeps the event from being illegal.",
}

SURVIVORS = {
    "sender N abort [uuid_of_my_epoch]: deleted": "withdrawn before",
    "sender N abort [uuid_of_my_epoch]: without remember_early": "its leg has come",
    "sender N abort [uuid_of_my_epoch]: without withdraw_again": "withdrawn before",
    "sender N abort: without remember_early": "its leg has come",
    "sender N done: without free_limbo": "silent first",
    "sender BWT hello [ack_foreign]: deleted": "another life ends it",
    "sender T abort [!bound]: deleted": "unbound is quiet",
    "sender B expire_lease [bound]: not asking bound": "the timer says it",
    "sender W expire_lease [bound]: not asking bound": "the timer says it",
    "sender B expire_bootstrap [gated+!bound]: not asking gated": "the timer says it",
    "sender B expire_bootstrap [gated+!bound]: not asking !bound": "the timer says it",
    "sender S hello [foreign_digest]: deleted": "another attempt",
    "sender F abort: without withdraw_again": "withdrawn before",
    "sender F done: without count_late_done": "counter",
    "sender SF tombstone_timer: without forget": "dropped with its record",
    "receiver B unknown [from_candidate+newer_life]: not asking from_candidate": "out is out",
    "receiver B unknown [from_candidate]: deleted": "nothing but a name",
    "receiver B unknown [from_candidate]: not asking from_candidate": "nothing but a name",
    "receiver B failed [!from_candidate+!echo]: deleted": "out and told",
    "receiver B failed [!from_candidate+!echo]: without reply_abort": "out and told",
    "receiver B failed [last_candidate+echo]: without bind_peer": "over in this step",
    "receiver B failed [last_candidate]: without bind_peer": "over in this step",
    "receiver B refused,peer_silence [from_candidate+last_candidate]: not asking from_candidate": "only who knows the peer",
    "receiver WT no_candidate: deleted": "noted means answered",
    "receiver WT no_candidate: to F": "noted means answered",
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]: deleted": "read after rebirth",
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]: to =": "read after rebirth",
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]: without engine_stop": "read after rebirth",
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]: without abandon_pull": "read after rebirth",
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]: without notice_abort": "read after rebirth",
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]: without bury": "read after rebirth",
    "receiver T ready [!same_uuid]: deleted": "registered once",
    "receiver W ready [!same_uuid]: deleted": "registered once",
    "receiver T failed [echo+quiet]: deleted": "a lost room is a newer life",
    "receiver T failed [echo+quiet]: without engine_stop": "a lost room is a newer life",
    "receiver WT refused,peer_silence [from_bound]: without abandon_pull": "dropped with its server",
    "receiver W start [has_uuid+pages_taken+fresh]: not asking has_uuid": "asked by the scheduler",
    "receiver W start [has_uuid+pages_taken+fresh]: not asking pages_taken": "asked by the scheduler",
    "receiver W start [has_uuid+pages_taken]: not asking has_uuid": "asked by the scheduler",
    "receiver W start [has_uuid+pages_taken]: not asking pages_taken": "asked by the scheduler",
    "receiver WT peer_reborn [from_bound+newer_life]: without abandon_pull": "dropped with its server",
    "receiver WT peer_reborn [from_bound+newer_life]: not asking newer_life": "rebirth is newer",
    "receiver F failed [noticed+quiet+notice_epoch]: not asking noticed": "no notice, no end",
    "receiver F failed [noticed+quiet+notice_epoch]: not asking quiet": "echo of a quiet abort",
    "receiver F failed [noticed+quiet+notice_epoch]: not asking notice_epoch": "old frames are not read",
    "receiver S ready [from_bound+same_uuid]: not asking from_bound": "uuids are unique",
    "receiver S ready [from_bound+same_uuid]: not asking same_uuid": "registered once",
    "receiver S failed [!from_bound+!echo]: deleted": "its notice is open",
    "receiver S failed [!from_bound]: not asking !from_bound": "echo of a lost room",
    "receiver S done_ack [uuid_mine]: not asking uuid_mine": "the done's own uuid",
    "receiver S abort_local,engine_error: deleted": "nobody says so",
    "receiver SF tombstone_timer [no_notice]: without forget": "dropped with its record",
}


def argument(name: str) -> str:
    """The key of REASONS that argues a survivor; "": nothing does."""
    return SURVIVORS.get(name, "")
