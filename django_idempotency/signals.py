"""What happened to a key, for metrics and logs.

Every signal is sent with ``sender`` (the view or the consumer), ``operation`` and the arguments that its
comment names. It is sent when the fact is certain: ``key_completed``, for example, after COMMIT. Receivers'
errors are logged, never raised.
"""

from __future__ import annotations

from django.dispatch import Signal

key_claimed = Signal()  # attempt
key_taken_over = Signal()  # attempt
key_completed = Signal()  # response, seconds: how long the run took until this was written, by the process's clock
key_failed = Signal()  # reason, seconds
key_released = Signal()  # seconds; the record is deleted, so the key is free
response_replayed = Signal()  # response
request_rejected = (
    Signal()
)  # reason, a Rejection; for some of them also retry_after, hold_reason, age
key_reaped = Signal()  # on_hold, reason; its lease had lapsed, and maintenance freed the key or put it on hold
operator_decided = (
    Signal()
)  # act: allow_retry, fail, resolve, extend; by: a user or a name; digest
response_viewed = (
    Signal()
)  # user, who saw the stored body in the admin; None if it was exported
claim_lost = Signal()  # attempt; a rival was quicker between claim and row lock: nothing was run, and it is a duplicate
stale_write_rejected = (
    Signal()
)  # attempt; an owner came back too late: the fencing token kept it from writing
store_failed = Signal()  # error
