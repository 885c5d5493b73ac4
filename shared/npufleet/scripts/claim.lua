-- Claims entries whose lease is over: of owners without a heartbeat, and own ones (a lost answer).
-- KEYS: one lane; the live workers (by server time of their heartbeat, ms).
-- ARGV: group, consumer, the consumer "returned", lease ms, how many at most, the cursor.
-- Answers {next cursor, {entry id, delivery count, flat fields} per claimed entry}.
local lane, workers = KEYS[1], KEYS[2]
local group, me, returned, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local claimed = {}

local function alive(owner)
  local beat = redis.call('ZSCORE', workers, owner)
  return beat and now - tonumber(beat) <= lease
end

local rows = redis.pcall('XPENDING', lane, group, 'IDLE', lease, ARGV[6], '+', ARGV[5])
if rows.err then return {'-', claimed} end
for _, row in ipairs(rows) do
  local owner = row[2]
  if owner == me or (owner ~= returned and not alive(owner)) then
    local got = redis.call('XCLAIM', lane, group, me, lease, row[1])
    if got[1] and got[1][2] then
      claimed[#claimed + 1] = {row[1], row[4] + 1, got[1][2]}
    end
  end
end
local last = rows[#rows]
return {last and #rows == tonumber(ARGV[5]) and '(' .. last[1] or '-', claimed}
