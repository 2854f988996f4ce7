"""The scripts that Redis runs: each is atomic, reads the server's clock and touches one key, so that a cluster runs it.

A record is a hash of texts, with times in microseconds since 1970. An empty text stands for no value.

A reply shows a record as one text, because redis-py parses each part of a reply by itself: the server's time, how many
bytes each of ``FIELDS`` has, a line feed, and the fields. Without a record, the reply is only the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1

FIELDS = (
    *("scope", "key", "fingerprint", "trace", "mode", "hold_on_crash", "created_at", "status", "attempts", "on_hold"),
    *("reason", "token", "locked_at", "locked_until", "expires_at"),
    *("response_status", "response_headers", "response_body", "has_body"),
)

PRELUDE = """
local key = KEYS[1]
local function text(number) return string.format('%.0f', number) end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function keep(milliseconds)
    if milliseconds == '0' then redis.call('PERSIST', key) else redis.call('PEXPIRE', key, milliseconds) end
end
local function is_as_seen(seen)
    if redis.call('EXISTS', key) == 0 then return false end
    local found = redis.call('HMGET', key, 'status', 'token', 'attempts', 'locked_until', 'expires_at', 'created_at')
    return table.concat(found, ' ') == seen
end
local function end_claim(status, reason, on_hold, retention)
    redis.call('HSET', key, 'status', status, 'reason', reason, 'on_hold', on_hold, 'token', '', 'locked_at', '',
        'locked_until', '', 'updated_at', text(now), 'expires_at', text(now + retention))
end
"""
SHOWN = f"""
local function shown()
    if redis.call('EXISTS', key) == 0 then return nil end
    local found = redis.call('HMGET', key, {", ".join(map(repr, FIELDS))})
    local sizes = {{}}
    for place = 1, #found do
        found[place] = found[place] or ''
        sizes[place] = #found[place]
    end
    return text(now) .. ' ' .. table.concat(sizes, ' ') .. '\\n' .. table.concat(found)
end
"""


@dataclass(frozen=True)
class Script:
    body: str
    source: str = field(init=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", PRELUDE + self.body)
        object.__setattr__(self, "sha", sha1(self.source.encode(), usedforsecurity=False).hexdigest())


READ = Script(SHOWN + "return shown() or text(now)")

CLAIM = Script(
    SHOWN
    + """
local there = shown()
if there then return there end
local token, scope, raw_key, method, path, fingerprint, trace, mode, hold_on_crash = unpack(ARGV, 1, 9)
local lease, retention, kept = unpack(ARGV, 10)
redis.call('HSET', key, 'scope', scope, 'key', raw_key, 'method', method, 'path', path, 'fingerprint', fingerprint,
    'trace', trace, 'mode', mode, 'hold_on_crash', hold_on_crash, 'created_at', text(now), 'status', 'processing',
    'attempts', '1', 'on_hold', '0', 'reason', '', 'token', token, 'locked_at', text(now),
    'locked_until', text(now + lease), 'updated_at', text(now), 'expires_at', text(now + retention),
    'replays', '0', 'ended_by', '', 'response_status', '', 'response_headers', '', 'response_body', '', 'has_body', '0')
keep(kept)
return text(now)
"""
)

REASSIGN = Script("""
local seen, token, method, path, fingerprint, trace, mode, hold_on_crash = unpack(ARGV, 1, 8)
local lease, retention, kept, attempts = unpack(ARGV, 9)
if redis.call('HGET', key, 'token') == token then
    redis.call('HSET', key, 'updated_at', text(now))
    return 1
end
if not is_as_seen(seen) then return 0 end
redis.call('HSET', key, 'method', method, 'path', path, 'fingerprint', fingerprint, 'trace', trace, 'mode', mode,
    'hold_on_crash', hold_on_crash, 'status', 'processing', 'attempts', attempts, 'on_hold', '0', 'reason', '',
    'token', token, 'locked_at', text(now), 'locked_until', text(now + lease), 'updated_at', text(now),
    'expires_at', text(now + retention), 'ended_by', '',
    'response_status', '', 'response_headers', '', 'response_body', '', 'has_body', '0')
if attempts == '1' then redis.call('HSET', key, 'created_at', text(now), 'replays', '0') end
keep(kept)
return 1
""")

HOLD = Script("""
local seen, reason, retention = unpack(ARGV)
if not is_as_seen(seen) then return 0 end
end_claim('failed', reason, '1', retention)
redis.call('PERSIST', key)
return 1
""")

# An owner whose response was lost repeats its call: it has ended the record already, and is told so. The script writes
# the time nevertheless, so that there is something that replicas can acknowledge.
END = Script("""
local token, status, reason, on_hold, retention, kept, response_status, headers, body, has_body = unpack(ARGV)
if redis.call('HGET', key, 'token') ~= token then
    local written = redis.call('HMGET', key, 'ended_by', 'status', 'reason', 'on_hold', 'response_status',
        'response_headers', 'response_body', 'has_body')
    local mine = {token, status, reason, on_hold, response_status, headers, body, has_body}
    for place = 1, #mine do
        if written[place] ~= mine[place] then return 0 end
    end
    redis.call('HSET', key, 'updated_at', text(now))
    return 1
end
end_claim(status, reason, on_hold, retention)
redis.call('HSET', key, 'ended_by', token, 'response_status', response_status, 'response_headers', headers,
    'response_body', body, 'has_body', has_body)
keep(kept)
return 1
""")

RELEASE = Script("""
if redis.call('HGET', key, 'token') ~= ARGV[1] then return 0 end
return redis.call('DEL', key)
""")

DELETE = Script("""
if not is_as_seen(ARGV[1]) then return 0 end
return redis.call('DEL', key)
""")

RENEW = Script("""
local token, lease, kept = unpack(ARGV)
if redis.call('HGET', key, 'token') ~= token then return 0 end
redis.call('HSET', key, 'locked_until', text(now + lease))
if redis.call('HGET', key, 'hold_on_crash') == '0' then keep(kept) end
return 1
""")

LEASE_LEFT = Script("""
if redis.call('HGET', key, 'token') ~= ARGV[1] then return '' end
redis.call('HSET', key, 'looked_at', text(now))
return text(redis.call('HGET', key, 'locked_until') - now)
""")

EXPIRE = Script("""
if redis.call('HGET', key, 'token') ~= ARGV[1] then return 0 end
if redis.call('HGET', key, 'locked_until') - now >= 0 then return 0 end
redis.call('HSET', key, 'locked_until', redis.call('HGET', key, 'locked_at'))
return 1
""")

COUNT_REPLAYS = Script("""
if redis.call('EXISTS', key) == 0 then return 0 end
redis.call('HINCRBY', key, 'replays', ARGV[1])
redis.call('HSET', key, 'last_replayed_at', text(now))
return 1
""")
