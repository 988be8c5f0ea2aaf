"""Rows of the table that no simulated world reaches, and why they stay in it (docs/decisions/0008)."""

LAST_RESORT = {
    "sender B engine_error": "before budget nothing of the engine has run yet: only a bug of the scheduler raises there",
    "sender T engine_error [!bound]": "a room that is not bound has not been registered, and only registering can fail then",
    "receiver WT no_candidate": "the driver tells it only to a room without candidates, and a room is bound only to one of them",
    "receiver WT unknown,pending,ready,failed [from_bound+newer_life]": "the first frame of a newer life ends the room before"
    " its messages are read",
    "receiver S abort_local,engine_error": "the manager takes such events for live rooms only",
}
