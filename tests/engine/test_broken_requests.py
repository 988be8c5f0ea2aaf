"""Bytes that are no HTTP, behind or within a request that is: one 400 or an end, and not a word in the log."""

from __future__ import annotations

import socket

import pytest
from test_access import start

__all__ = ["start"]

CHUNKED = b"host: x\r\ntransfer-encoding: chunked\r\n\r\n"
NO_SIZE = b"no size\r\n"


def told(server, *parts):
    """What comes back; each further part is sent when something has."""
    heard = b""
    with socket.create_connection(server.address, timeout=30) as stream:
        for part in parts:
            stream.sendall(part)
            try:
                heard += (more := stream.recv(65536))
            except ConnectionResetError:
                return heard
            if not more:
                return heard
        while more:
            try:
                heard += (more := stream.recv(65536))
            except ConnectionResetError:
                break
    return heard


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"GET /nothing HTTP/1.1\r\n" + CHUNKED + NO_SIZE], b"400"),
        ([b"POST /route HTTP/1.1\r\n" + CHUNKED + NO_SIZE], b"400"),
        ([b"GET /nothing HTTP/1.1\r\n" + CHUNKED, NO_SIZE], b"404"),
        ([b"\0\xff\r\n\r\n"], b"400"),
    ],
    ids=["with a request", "with a body", "after the answer", "alone"],
)
def test_what_is_no_http_ends_its_connection_quietly(start, caplog, parts, status):
    server = start()
    answer = told(server, *parts)
    assert answer.startswith(b"HTTP/1.1 " + status) and answer.count(b"HTTP/1.1 ") == 1
    assert told(server, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")[9:12] == b"200"
    assert caplog.text == ""
