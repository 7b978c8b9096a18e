"""The errors of requests, as HTTP and OpenAI's clients name them."""

from __future__ import annotations

from typing import Any


class ServingError(Exception):
    """A request that ends without an answer: HTTP's status, a code that clients may test for, a message for people, and
    the seconds after which the same request may succeed."""

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's form of an error."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


def bad_request(message: str, code: str = "invalid_value") -> ServingError:
    return ServingError(400, code, message)
