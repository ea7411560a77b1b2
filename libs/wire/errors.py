"""Errors that cross process boundaries.

BatonError                 has a code, a message, and whether trying again can help
  RequestRefused           a service said no (wire: Refused, Failed)
  BusError                 the message queue could not deliver
    NoResponder            nobody listens on the subject
    DeadlineExceeded       no answer in time; the other side may or may not have acted
    MessageTooLarge        larger than the server's max_payload; nothing was sent
  DecodeError              bytes that are not the message they should be; names the field
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Why a request failed. Gateways map codes to HTTP; metrics and traces use them as labels."""

    BAD_REQUEST = "bad_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    CAPACITY_EXCEEDED = "capacity_exceeded"  # can never fit this worker's pool
    OVERLOADED = "overloaded"  # queue is full; try later
    NO_WORKER = "no_worker"
    WORKER_LOST = "worker_lost"
    DRAINING = "draining"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ABORTED = "aborted"
    KV_UNAVAILABLE = "kv_unavailable"
    MODEL_MISMATCH = "model_mismatch"
    BAD_MESSAGE = "bad_message"
    INTERNAL = "internal"


class BatonError(Exception):
    """Base: every error has a code from `Code`, a message for people, and says if trying again can help."""

    code: Code = Code.INTERNAL
    retryable: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestRefused(BatonError):
    """A service refused or failed a request."""

    def __init__(
        self, code: Code, message: str, *, retryable: bool, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class BusError(BatonError):
    retryable = True

    def __init__(self, subject: str, message: str) -> None:
        super().__init__(message)
        self.subject = subject


class NoResponder(BusError):
    code = Code.NO_WORKER

    def __init__(self, subject: str) -> None:
        super().__init__(subject, f"nobody listens on {subject}")


class DeadlineExceeded(BusError):
    code = Code.DEADLINE_EXCEEDED

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(subject, f"no answer on {subject} within {timeout_s:g} s")
        self.timeout_s = timeout_s


class MessageTooLarge(BusError):
    code = Code.BAD_REQUEST
    retryable = False

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(subject, f"message for {subject} has {size} bytes; the server takes {limit}")
        self.size = size
        self.limit = limit


class DecodeError(BatonError):
    code = Code.BAD_MESSAGE
