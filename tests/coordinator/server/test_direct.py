import random
from typing import Any

import aiohttp
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from unicron_lightning.coordinator.server.peers import DirectWebSocket, WholeFrames


class Parser:
    def __init__(self) -> None:
        self.received = b""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self.received += data
        return False, b""

    def feed_eof(self) -> None:
        pass


def frame(first: int, payload: bytes, chance: random.Random) -> bytes:
    size, mask = len(payload), chance.randbytes(4)
    short, long = (126, 2) if size < 1 << 16 else (127, 8)
    length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | short]) + size.to_bytes(long, "big")
    return bytes([first]) + length + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))


def test_frames_are_divided_however_they_arrive() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        parser, handled = Parser(), list[bytes]()
        whole = WholeFrames(parser, lambda: None, 1.0)
        whole.handle = lambda payload, to=handled: to.append(payload) or True
        texts, others, stream, through = [], b"", b"", False
        for _ in range(chance.randrange(1, 12)):
            first = chance.choice([0x81, 0x81, 0x81, 0x89, 0x8A, 0x01 if seed % 3 == 0 else 0x81])
            payload = chance.randbytes(chance.choice([0, 1, 5, 125, 126, 300, 70_000 if seed % 10 == 0 else 3]))
            payload = payload[:125] if first > 0x81 else payload
            one = frame(first, payload, chance)
            through = through or first == 0x01 or len(payload) >= 1 << 16
            if through or first != 0x81:
                others += one
            else:
                texts.append(payload)
            stream += one
        while stream:
            size = chance.choice([1, 2, 7, 200, 1 << 17])
            whole.feed_data(stream[:size])
            stream = stream[size:]
        assert handled == texts and parser.received == others and whole._through == through, seed


def test_a_frame_that_is_not_handled_goes_to_the_parser() -> None:
    chance, parser = random.Random(1), Parser()
    whole = WholeFrames(parser, lambda: None, 1.0)
    whole.handle = lambda payload: payload != b"no"
    frames = [frame(0x81, text, chance) for text in (b"yes", b"no", b"yes")]
    whole.feed_data(b"".join(frames))
    assert parser.received == frames[1]


async def test_messages_arrive_in_order_and_pings_are_answered() -> None:
    read: list[str] = []
    direct: list[bytes] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        socket = DirectWebSocket(heartbeat=10.0, compress=False)
        await socket.prepare(request)

        def handle(payload: bytes) -> bool:
            if payload == b"malformed":
                return False
            direct.append(payload)
            return True

        over = False
        async for message in socket:
            read.append(message.data)
            over = over or socket.hand_over(handle)
            await socket.send_str(message.data)
        return socket

    app = web.Application()
    app.router.add_get("/", serve)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as http,
        http.ws_connect(server.make_url("/"), autoping=False) as socket,
    ):
        await socket.send_str("first")
        assert (await socket.receive()).data == "first"
        for number in range(5):
            await socket.send_str(f"message {number}")
        await socket.ping(b"here")
        answer: Any = await socket.receive()
        assert answer.type is WSMsgType.PONG and answer.data == b"here"
        await socket.send_str("malformed")
        await socket.send_str("later")
        assert [(await socket.receive()).data for _ in range(2)] == ["malformed", "later"]
    assert direct == [f"message {number}".encode() for number in range(5)], "aiohttp's private names have changed"
    assert read == ["first", "malformed", "later"]
