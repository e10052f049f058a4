"""As much of OpenAI's API as the programs need, around a function; standard library only, since it runs in the peers' environments."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    text: str
    prompt_tokens: int
    completion_tokens: int
    cut: bool


def serve(port: int, answer: Callable[[dict], Answer]) -> None:
    """Answers for ever; `answer` is given the body of each request, from a thread of its own."""
    server = Server(("127.0.0.1", port), Handler)
    server.answer = answer
    server.serve_forever()


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # programs come many at once; five may wait otherwise


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"data": [{"id": "model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer = self.server.answer(body)
        except Exception as error:  # told to the client, whatever it is
            message = f"{type(error).__name__}: {error}"
            self._send(400, "application/json", json.dumps({"error": {"message": message, "type": "invalid_request_error"}}))
            return
        said = {"delta": {"content": answer.text}} if "messages" in body else {"text": answer.text}
        nothing = {"delta": {}} if "messages" in body else {"text": ""}
        end = {"index": 0, "finish_reason": "length" if answer.cut else "stop"}
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        events = [{"choices": [{"index": 0, "finish_reason": None} | said]}, {"choices": [end | nothing]}, {"choices": [], "usage": usage}]
        self._send(200, "text/event-stream", "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _send(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given: object) -> None:
        pass
