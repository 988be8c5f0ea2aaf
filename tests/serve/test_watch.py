"""The watch over a call's connection: whatever ends it ends the call, and it leaves nothing behind."""

import asyncio

import pytest
from serve_fakes import FakeEngine

from pdjax.sched.request import SamplingParams
from pdjax.serve.calls import Desk, Disconnected, Prompt
from pdjax.serve.log import ServerLog
from pdjax.serve.params import Bootstrap

BOUND_S = 60.0


@pytest.fixture
def desk():
    engine = FakeEngine(script=lambda request: [...])  # silent
    yield Desk(engine, ServerLog(level="error"))
    engine.close()


def watched(desk, receive):
    """What a call meets whose connection is this one, and the tasks that are left when the watch is over."""

    async def run():
        call = desk.open([Prompt([5], SamplingParams(), Bootstrap(), None)], stream=True)
        async with asyncio.timeout(BOUND_S):
            try:
                async with call.watch(receive):
                    await call.collect()
            except Disconnected as met:
                return met, asyncio.all_tasks() - {asyncio.current_task()}

    return asyncio.run(run())


async def disconnected():
    return {"type": "http.disconnect"}


async def broken():
    raise ConnectionError("the transport is gone")


@pytest.mark.parametrize("receive", [disconnected, broken])
def test_a_disconnect_and_an_error_of_the_connection_end_the_call(desk, receive, caplog):
    met, left = watched(desk, receive)
    assert isinstance(met, Disconnected) and left == set()
    assert desk.counts()["abandoned"] == 1 and desk.live() == 0
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [] if receive is disconnected else ["a client's connection failed: the transport is gone"]
    )


def test_a_watch_has_ended_its_task_when_it_is_left(desk):
    """Cancelling alone leaves it running into the next turn of the loop, where it could still take what comes."""

    async def silent():
        await asyncio.Event().wait()

    async def run():
        call = desk.open([Prompt([5], SamplingParams(), Bootstrap(), None)], stream=False)
        async with call.watch(silent):
            await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(run()) == set()
    assert desk.counts()["abandoned"] == 1
