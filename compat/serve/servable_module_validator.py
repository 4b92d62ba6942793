"""Callback that checks before training that a model answers an example request correctly."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import torch

from ...callbacks import Callback
from ...common.messages import name_type
from ...common.validation import check_bool, check_int, check_positive, choose
from ...engine import evaluation_mode
from .servable_module import ServableModule

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer

__all__ = ["ServableModule", "ServableModuleValidator"]


class Response:
    """HTTP response to the example request."""

    def __init__(self, status_code: int, text: str) -> None:
        self.status_code, self.text = status_code, text

    def json(self) -> Any:
        """Return the body, parsed as JSON."""
        return json.loads(self.text)


class ServableModuleValidator(Callback):
    """Callback that serves the task on rank zero before training, sends its example request and checks the response.

    Args:
        optimization: Must be None.
        server: Must be ``"fastapi"``, although Python's ``http.server`` is used.
        host: Address on which the server listens. Default: ``"127.0.0.1"``.
        port: Port on which the server listens; 0 for any free port. Default: 8080.
        timeout: Seconds to wait for the response. Default: 20.
        exit_on_failure: Whether to raise an error if the model responds with an error. A timeout, or a response that
            differs from the expected one, always raises an error. Default: True.

    Attributes:
        resp: The response, with ``status_code`` and ``json()``; None without a response.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """

    def __init__(
        self,
        optimization: str | None = None,
        server: str = "fastapi",
        host: str = "127.0.0.1",
        port: int = 8080,
        timeout: float = 20,
        exit_on_failure: bool = True,
    ) -> None:
        if optimization is not None:
            raise ValueError(f"optimization={optimization!r} is not supported. Remove it.")
        self.optimization = optimization
        self.server = choose("server", server, ("fastapi",))
        self.host, self.port = host, check_int("port", port, 0)
        self.timeout = check_positive("timeout", timeout, "in seconds")
        self.exit_on_failure = check_bool("exit_on_failure", exit_on_failure)
        self.resp: Response | None = None

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Serve the task on rank zero, send its example request, and compare the response with the expected one.

        An error on rank zero raises a RuntimeError on the other ranks.
        """
        with trainer.accelerator.world.together():
            if trainer.is_global_zero:
                self._validate(pl_module)

    def _validate(self, task: Any) -> None:
        if not isinstance(task, ServableModule):
            raise TypeError(
                f"ServableModuleValidator needs a task that is also a ServableModule, not {name_type(task)}. Add "
                f"ServableModule to the base classes of {type(task).__name__}."
            )
        payload = task.configure_payload()
        if "body" not in payload:
            raise ValueError(
                f"configure_payload returned a dict with the keys {list(payload)}, but it must contain 'body'."
            )
        server = ThreadingHTTPServer((self.host, self.port), _make_handler(task))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            with evaluation_mode(task):
                self.resp = self._ask(f"http://{self.host}:{server.server_address[1]}/serve", payload)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        if not self.successful:
            if self.exit_on_failure:
                raise ValueError(f"the model failed to answer its example request: {self.resp.text}")
            return
        expected = task.configure_response()
        if self.resp.json() != expected:
            raise ValueError(f"the model returned {self.resp.json()!r}, but configure_response expects {expected!r}.")

    def _ask(self, address: str, payload: dict[str, Any]) -> Response:
        body = json.dumps(payload).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        # A proxy would not know this machine's ports.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=self.timeout) as answer:
                return Response(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Response(error.code, error.read().decode())

    @property
    def successful(self) -> bool | None:
        """Return whether the request succeeded; None without a response."""
        return None if self.resp is None else self.resp.status_code == 200

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"successful": self.successful, "optimization": self.optimization, "server": self.server}


def _make_handler(model: ServableModule) -> type[BaseHTTPRequestHandler]:
    deserializers, serializers = model.configure_serialization()

    def serve(body: dict[str, Any]) -> dict[str, Any]:
        arguments = {name: deserializers.get(name, lambda value: value)(value) for name, value in body.items()}
        with torch.no_grad():
            results = model.serve_step(**arguments)
        if not isinstance(results, dict):
            raise TypeError(f"serve_step returned {name_type(results)}. It must return a dict of tensors by name.")
        return {name: serializers.get(name, lambda value: value)(value) for name, value in results.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                status, answer = 200, json.dumps(serve(json.loads(content)["body"]))
            except Exception as error:  # the client gets the error, and raises it
                status, answer = 500, f"{type(error).__name__}: {error}"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    return Handler
