"""A receiver of webhooks on this machine: what it got, and what it answers."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from contextlib import contextmanager


class Receiver:
    """``got``: the headers and the body of each call. ``status`` and ``location``: of its answers."""

    def __init__(self, port, certificate):
        self.got = []
        self.status = 204
        self.location = None
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.headers, body))
                self.send_response(receiver.status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self):
                receiver.got.append((self.headers, b""))
                self.send_error(405)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(context)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]

    @property
    def bodies(self):
        return [json.loads(body) for _, body in self.got]

    @property
    def events(self):
        """All received events, as (federation, kind, device)."""
        return [(each["federation"], each["kind"], each["device"]) for body in self.bodies for each in body["events"]]

    @property
    def alerts(self):
        """All received alerts, as (kind, federation, over)."""
        return [(each["kind"], each["federation"], each["over"]) for body in self.bodies for each in body["alerts"]]


@contextmanager
def receiving(port=0, certificate=None):
    """Context manager: a receiver. certificate: trustme's, for https."""
    receiver = Receiver(port, certificate)
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()
