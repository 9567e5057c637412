"""Admission to a server that has a key: only clients whose key fits may enter."""

from __future__ import annotations

import logging

import zmq
from zmq.utils import z85

from specdec.sdk.keys import ServerKey

logger = logging.getLogger("specdec")

ASKED_AT = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client may come in (ZeroMQ RFC 27)."""

COME_IN, STAY_OUT = b"200", b"400"


class Door:
    """Answers libzmq, in the server's own loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], served: zmq.Socket[bytes], key: ServerKey) -> None:
        """`served` is encrypted from now on, before it is bound."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ASKED_AT)
        self._client = z85.decode(key.client)
        served.zap_domain = b"specdec"
        served.curve_server = True
        served.curve_publickey, served.curve_secretkey = key.public.encode(), key.secret.encode()

    def answer(self) -> None:
        """Answer one question of libzmq: whether a client may connect."""
        version, number, _, address, _, mechanism, *proof = self.socket.recv_multipart()
        fits = mechanism == b"CURVE" and proof == [self._client]
        if not fits:
            logger.warning("a client at %s has no key that fits", address.decode(errors="replace"))
        status, text = (COME_IN, b"OK") if fits else (STAY_OUT, b"no key that fits")
        self.socket.send_multipart([version, number, status, text, b"", b""])
