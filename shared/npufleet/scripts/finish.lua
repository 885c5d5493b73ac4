-- Ends entries: acknowledge, delete, reply, mark the id, tell the gateways; one status per item.
-- KEYS: the lanes high, normal, low; the dead letters; the cancelled ids; then the reply, seen and
--   body keys that items name by their index (0: none).
-- ARGV: group, consumer, largest reply that travels in a hint (bytes), dead letters kept, life of a
--   dead letter's body (ms), number of items; per item: kind (ok, error or dead), lane index, entry
--   id, wire id, reply index, reply TTL ms, seen index, body index, channel ('' for none), reply,
--   error code, error message.
-- The first success wins, whoever sends it; errors and dead letters need ownership.
-- Answers one word per item: ok, gone (somebody answered it before), lost (not owned any more).
local group, me, inline, max_dead = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local dead_body_ttl = ARGV[5]
local marks = redis.call('ZCARD', KEYS[5]) > 0
local max_letter = 2000
local hints, channels, results, at = {}, {}, {}, 7

local function owned(lane, entry)
  local row = redis.pcall('XPENDING', lane, group, entry, entry, 1, me)
  if row.err or not row[1] then return nil end
  return row[1][4]
end

local function bury(lane, entry, deliveries, code, message)
  local found = redis.call('XRANGE', lane, entry, entry)
  local letter = found[1] and found[1][2] or {}
  local now = redis.call('TIME')
  -- Cut where a hand-written entry has more fields than Lua can pass on in one call.
  for i = #letter, max_letter + 1, -1 do letter[i] = nil end
  local extra = {'dead_code', code, 'dead_message', message, 'dead_lane', lane, 'dead_entry', entry,
    'dead_deliveries', deliveries, 'dead_worker', me,
    'dead_at_ms', now[1] * 1000 + math.floor(now[2] / 1000)}
  for _, value in ipairs(extra) do letter[#letter + 1] = value end
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', max_dead, '*', unpack(letter))
end

local function mark_done(seen, ttl)
  local value = redis.call('GET', seen)
  if not value then return end  -- unknown by now: without its digest it would refuse its own body
  local digest = string.match(value, '^%a+:(%x*)') or ''
  redis.pcall('SET', seen, 'done:' .. digest .. ':', 'PX', ttl)
end

local function text(id)  -- a msgpack string: a hint that says "look at this id's key"
  if #id < 32 then return string.char(0xa0 + #id) .. id end
  return string.char(0xd9, #id) .. id
end

local function hint(channel, reply, id)
  if not hints[channel] then
    hints[channel] = {}
    channels[#channels + 1] = channel
  end
  table.insert(hints[channel], #reply <= inline and reply or text(id))
end

local function finish(i)
  local kind, lane, entry, id = ARGV[i], KEYS[tonumber(ARGV[i + 1])], ARGV[i + 2], ARGV[i + 3]
  local reply_ttl, seen_at, body_at = ARGV[i + 5], tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7])
  local channel, reply = ARGV[i + 8], ARGV[i + 9]
  local deliveries
  if kind ~= 'ok' then
    deliveries = owned(lane, entry)
    if not deliveries then return 'lost' end
  end
  -- First of all: a script that has written is not stopped by maxmemory, and 1 is the permission to reply.
  if redis.pcall('XACK', lane, group, entry) ~= 1 then return 'gone' end
  if kind == 'dead' then
    bury(lane, entry, deliveries, ARGV[i + 10], ARGV[i + 11])
  end
  redis.pcall('XDEL', lane, entry)
  local key = KEYS[tonumber(ARGV[i + 4])]
  redis.pcall('RPUSH', key, reply)
  redis.pcall('PEXPIRE', key, reply_ttl)
  if seen_at > 0 then mark_done(KEYS[seen_at], reply_ttl) end
  if body_at > 0 then
    if kind == 'dead' then
      redis.pcall('PEXPIRE', KEYS[body_at], dead_body_ttl)
    else
      redis.pcall('UNLINK', KEYS[body_at])
    end
  end
  if marks then redis.pcall('ZREM', KEYS[5], id) end
  if channel ~= '' then hint(channel, reply, id) end
  return 'ok'
end

for n = 1, tonumber(ARGV[6]) do
  results[n] = finish(at)
  at = at + 12
end
for _, channel in ipairs(channels) do
  redis.pcall('PUBLISH', channel, table.concat(hints[channel]))
end
return results
