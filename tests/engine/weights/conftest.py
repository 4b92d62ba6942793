"""Fixtures of weights."""

import http.server
import threading

import pytest


@pytest.fixture
def server(tmp_path):
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self):
            asked.append(self.path)
            if self.path.startswith("/to-"):
                self.send_response(302)
                self.send_header("Location", {"/to-file": f"file://{tmp_path}/w.pt", "/to-w": "/w.pt"}[self.path])
                self.end_headers()
            elif self.path == "/large":
                self.send_response(200)
                self.send_header("Content-Length", str(2**60))
                self.end_headers()
            else:
                super().do_GET()

        def log_message(self, *args):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}", asked
    served.shutdown()
    served.server_close()
