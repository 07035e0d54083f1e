"""A reward server that imports nothing heavy and can be told to fail: a process of the tests.

    python reward_stub.py PORT BEHAVIOUR [ANSWERS]

It prints the port that it listens on; ``PORT`` 0: any that is free.
``BEHAVIOUR``: digit (1 where the response begins with a digit, else 0), or a way to fail. After
``ANSWERS`` good answers the process ends as if it had been killed.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, BEHAVIOUR = int(sys.argv[1]), sys.argv[2]
CUT = []  # the answer that was cut short
PAGES = {"page": 200, "page_404": 404}  # shown twice in place of an answer
SHOWN = []
LEFT = [int(sys.argv[3]) if len(sys.argv) > 3 else 10**9]
WRONG = {
    "not_json": (200, b"<html>welcome</html>"),
    "no_rewards": (200, b'{"scores": [1.0]}'),
    "nan": (200, b'{"rewards": [NaN]}'),
    "huge": (200, b'{"rewards": [0.5, 1e300]}'),
    "too_many": (200, b'{"rewards": [1.0, 2.0]}'),
    "ids": (200, b'{"rewards": [1.0], "ids": [1]}'),
    "not_here": (404, b'{"error": "no such path"}'),
    "redirect": (302, b""),
    "teapot": (418, b'{"error": "I am a teapot"}'),
    "failing": (500, b'{"error": "out of memory"}'),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        health = {"status": "ok", "attributes": ["a", "b"] if BEHAVIOUR == "two" else []}
        self.answer(200, json.dumps(health).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        samples = body["samples"]
        if BEHAVIOUR in WRONG and samples:
            self.answer(*WRONG[BEHAVIOUR])
            return
        if BEHAVIOUR in PAGES and samples and len(SHOWN) < 2:
            SHOWN.append(True)
            self.answer(PAGES[BEHAVIOUR], b"<html>back soon</html>")
            return
        if BEHAVIOUR == "silent" and samples:
            time.sleep(60)
        if samples:
            if LEFT[0] <= 0:
                os._exit(9)
            LEFT[0] -= 1
        if BEHAVIOUR == "drip_headers" and samples:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                self.wfile.write(b"X-More: y\r\n"[:1])
                self.wfile.flush()
                time.sleep(0.2)
        rewards = [float(sample["response"][:1].isdigit()) for sample in samples]
        if BEHAVIOUR == "two":
            rewards = [[reward, 10.0] for reward in rewards]
        body = json.dumps({"rewards": rewards}).encode()
        if BEHAVIOUR == "cut" and samples and not CUT:
            CUT.append(True)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.answer(200, body, drip=BEHAVIOUR == "drip" and bool(samples))

    def answer(self, status, body, drip=False):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for start in range(len(body)):
            if not drip:
                self.wfile.write(body)
                return
            self.wfile.write(body[start : start + 1])
            self.wfile.flush()
            time.sleep(0.2)

    def log_message(self, *arguments):
        pass


ThreadingHTTPServer.request_queue_size = 256
server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
print(server.server_port, flush=True)
server.serve_forever()
