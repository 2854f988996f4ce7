"""The scripts that Redis runs: each is atomic, and reads the server's clock.

A script has three keys in one slot, so that a cluster runs it:

- the record;
- a sorted set of the unfinished records, those in progress and on hold, whose keys
  begin alike. Those on hold come first in it, then those claimed first;
- the token to which the record was last given by anybody but its owner, empty if it was
  put on hold or deleted. It outlives the record by a day, for an owner that was frozen.

A record is a hash of texts, with times in microseconds since 1970. An empty text stands
for no value.

A reply shows a record as one text, because redis-py parses each part of a reply by
itself: the server's time, how many bytes each of ``FIELDS`` has, a line feed, and the
fields. Without a record, the reply is only the time.
"""

from __future__ import annotations

from hashlib import sha1

FIELDS = (
    "scope",
    "key",
    "fingerprint",
    "mode",
    "hold_on_crash",
    "created_at",
    "status",
    "attempts",
    "on_hold",
    "reason",
    "token",
    "locked_at",
    "locked_until",
    "expires_at",
    "response_status",
    "response_headers",
    "response_body",
    "has_body",
)

PRELUDE = f"""
local key, unfinished, given = unpack(KEYS)
local id = string.sub(key, -32)
local function text(number) return string.format('%.0f', number) end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
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
local function is_as_seen(seen)
    if redis.call('EXISTS', key) == 0 then return false end
    local found = redis.call('HMGET', key, 'status', 'token', 'attempts',
        'locked_until', 'expires_at', 'created_at')
    return table.concat(found, ' ') == seen
end
local function give(token) redis.call('SET', given, token, 'EX', 86400) end
local function keep(milliseconds)
    if milliseconds == '0' then redis.call('PERSIST', key) else redis.call('PEXPIRE',
        key, milliseconds) end
end
local function claim(token, attempts, method, path, fingerprint, mode, hold_on_crash,
    lease, retention, kept)
    redis.call('HSET', key, 'method', method, 'path', path, 'fingerprint', fingerprint,
        'mode', mode,
        'hold_on_crash', hold_on_crash, 'status', 'processing', 'attempts', attempts,
            'on_hold', '0', 'reason', '',
        'token', token, 'locked_at', text(now), 'locked_until', text(now + lease),
            'updated_at', text(now),
        'expires_at', text(now + retention), 'ended_by', '',
        'response_status', '', 'response_headers', '', 'response_body', '', 'has_body',
            '0')
    if attempts == '1' then redis.call('HSET', key, 'created_at', text(now), 'replays',
        '0') end
    redis.call('ZADD', unfinished, now + lease, id)
    keep(kept)
end
local function end_claim(status, reason, on_hold, retention)
    if on_hold == '1' then redis.call('ZADD', unfinished, 0, id)
        else redis.call('ZREM', unfinished, id) end
    redis.call('HSET', key, 'status', status, 'reason', reason, 'on_hold', on_hold,
        'token', '', 'locked_at', '',
        'locked_until', '', 'updated_at', text(now), 'expires_at',
            text(now + retention))
end
local function delete()
    redis.call('ZREM', unfinished, id)
    return redis.call('DEL', key)
end
"""


class Script:
    def __init__(self, body: str) -> None:
        self.source = PRELUDE + body
        self.sha = sha1(self.source.encode(), usedforsecurity=False).hexdigest()


READ = Script("return shown() or text(now)")

UNFINISHED = Script("return redis.call('ZRANGE', unfinished, 0, ARGV[1] - 1)")

# An abandoned record expires, and leaves its id in the set.
READ_UNFINISHED = Script("""
if redis.call('EXISTS', key) == 0 then redis.call('ZREM', unfinished, id) end
return shown() or text(now)
""")

# A caller whose reply was lost repeats its call with the same token, perhaps on another
# connection, and WAIT only waits for what its own connection has written. So a script
# that is waited for writes even if it finds its work done already.

CLAIM = Script("""
local there = shown()
if there then
    if redis.call('HGET', key, 'token') == ARGV[3] then redis.call('HSET', key,
        'updated_at', text(now)) end
    return there
end
redis.call('HSET', key, 'scope', ARGV[1], 'key', ARGV[2])
claim(unpack(ARGV, 3))
return text(now)
""")

REASSIGN = Script("""
if redis.call('HGET', key, 'token') == ARGV[2] then
    redis.call('HSET', key, 'updated_at', text(now))
    return 1
end
if not is_as_seen(ARGV[1]) then return 0 end
give(ARGV[2])
claim(unpack(ARGV, 2))
return 1
""")

HOLD = Script("""
local seen, reason, retention = unpack(ARGV)
if not is_as_seen(seen) then return 0 end
give('')
end_claim('failed', reason, '1', retention)
redis.call('PERSIST', key)
return 1
""")

END = Script("""
local token, status, reason, on_hold, retention, kept, response_status, headers, body,
    has_body = unpack(ARGV)
if redis.call('HGET', key, 'token') ~= token then
    local written = redis.call('HMGET', key, 'ended_by', 'status', 'reason', 'on_hold',
        'response_status',
        'response_headers', 'response_body', 'has_body')
    local mine = {token, status, reason, on_hold, response_status, headers, body,
        has_body}
    for place = 1, #mine do
        if written[place] ~= mine[place] then return 0 end
    end
    redis.call('HSET', key, 'updated_at', text(now))
    return 1
end
end_claim(status, reason, on_hold, retention)
redis.call('HSET', key, 'ended_by', token, 'response_status', response_status,
    'response_headers', headers,
    'response_body', body, 'has_body', has_body)
keep(kept)
return 1
""")

RELEASE = Script("""
if redis.call('HGET', key, 'token') ~= ARGV[1] then return 0 end
return delete()
""")

DELETE = Script("""
if not is_as_seen(ARGV[1]) then return 0 end
if redis.call('HGET', key, 'token') ~= '' then give('') end
return delete()
""")

GIVEN = Script("return redis.call('GET', given)")

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
