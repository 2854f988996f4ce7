-- What wrk asks for. $PLAN: "fresh", a new key with every request; "replays", a hundred keys over and over;
-- "mixed", every tenth request repeats an earlier one. $RUN makes this run's keys its own, $BODY is what is posted.

local run, plan, body = os.getenv("RUN"), os.getenv("PLAN"), os.getenv("BODY")
local headers = { ["Content-Type"] = "application/json" }
local sent = 0

local function number()
    sent = sent + 1
    if plan == "replays" then
        return sent % 100
    elseif plan == "mixed" and sent > 200 and sent % 10 == 0 then
        return sent - 195 -- long answered, and no multiple of ten itself
    end
    return sent
end

function request()
    headers["Idempotency-Key"] = string.format("%s-0000-4000-8000-%012x", run, number())
    return wrk.format("POST", nil, headers, body)
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format(
        '\n{"requests": %d, "seconds": %f, "p50": %f, "p99": %f, "refused": %d, "errors": %d}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
        errors.status, errors.connect + errors.read + errors.write + errors.timeout
    ))
end
