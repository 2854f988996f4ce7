"""What happened to a key, for metrics and logs.

Every signal is sent with ``sender`` (the view or the consumer), ``operation`` and the
arguments that its comment names. It is sent when the fact is certain:
``key_completed``, for example, after COMMIT. Receivers' errors are logged, never
raised.
"""

from __future__ import annotations

from django.dispatch import Signal

key_claimed = Signal()  # attempt
key_taken_over = Signal()  # attempt
# response, seconds: how long the run took until this was written, by the process's
# clock
key_completed = Signal()
key_failed = Signal()  # reason, seconds
key_released = Signal()  # seconds; the record is deleted, so the key is free
response_replayed = Signal()  # response
# reason, a Rejection; for some of them also retry_after, hold_reason, age
request_rejected = Signal()
# reason, an Unprotected; its key protected nothing, although it was accepted (2xx, 3xx)
request_unprotected = Signal()
# on_hold, reason; its lease had lapsed, and maintenance freed the key or put it on hold
key_reaped = Signal()
# act: allow_retry, fail, resolve, extend; by: a user or a name; digest
operator_decided = Signal()
# user, who saw the stored body in the admin; None if it was exported
response_viewed = Signal()
# attempt; a rival was quicker between claim and row lock: nothing was run, and it is a
# duplicate
claim_lost = Signal()
# attempt; an owner came back too late: the fencing token kept it from writing
stale_write_rejected = Signal()
store_failed = Signal()  # error
