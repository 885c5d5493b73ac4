-- Takes up to `room` entries for a consumer over the lanes, without blocking: given-back ones first.
-- KEYS: the lanes high, normal, low; the cancelled ids.
-- ARGV: group, consumer, the consumer "returned", room, then pairs (lane index, cap) in serving order.
-- Answers {server time ms, lanes without a group, taken}; per taken entry
--   {lane index, entry id, delivery count, 1 if cancelled, flat fields}.
local group, me, returned, room = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local taken, missing = {}, {}
local marks = redis.call('ZCARD', KEYS[4]) > 0

local function is_cancelled(fields)
  if not marks then return 0 end
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then return redis.call('ZSCORE', KEYS[4], fields[i + 1]) and 1 or 0 end
  end
  return 0
end

local function keep(lane_at, entry, count)
  taken[#taken + 1] = {lane_at, entry[1], count, is_cancelled(entry[2]), entry[2]}
  room = room - 1
end

local function take_returned(lane_at, cap)
  local lane = KEYS[lane_at]
  local rows = redis.pcall('XPENDING', lane, group, '-', '+', cap, returned)
  if rows.err then return false end
  for _, row in ipairs(rows) do
    local claimed = redis.call('XCLAIM', lane, group, me, 0, row[1])
    if claimed[1] and claimed[1][2] then keep(lane_at, claimed[1], row[4] + 1) end
  end
  return true
end

for i = 5, #ARGV, 2 do
  local lane_at = tonumber(ARGV[i])
  local cap = math.min(room, tonumber(ARGV[i + 1]))
  if cap > 0 then
    local before = room
    if take_returned(lane_at, cap) then
      cap = cap - (before - room)
      if cap > 0 then
        local read = redis.pcall('XREADGROUP', 'GROUP', group, me, 'COUNT', cap,
          'STREAMS', KEYS[lane_at], '>')
        if read and not read.err and read[1] then
          for _, entry in ipairs(read[1][2]) do keep(lane_at, entry, 1) end
        end
      end
    else
      missing[#missing + 1] = lane_at
    end
  end
end
local now = redis.call('TIME')
return {now[1] * 1000 + math.floor(now[2] / 1000), missing, taken}
