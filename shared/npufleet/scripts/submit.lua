-- Puts entries into one lane: bound of the lane, state of brought ids, large bodies, XADD.
-- KEYS: lane, then the seen and body keys that items name by their index (0: none).
-- ARGV: max_queue, number of items; per item: seen index, digest, seen TTL ms,
--   body index, body TTL ms (0: none), body, number of fields, fields and values.
-- Answers {length of the lane, {status, detail} per item}; status is one of
--   added (entry id), full (length), queued (entry id), done, conflict, failed (the server's error).
local lane, max_queue = KEYS[1], tonumber(ARGV[1])
local length = redis.call('XLEN', lane)
local results, at = {}, 3

local function state_of(seen, digest)
  local value = redis.call('GET', seen)
  if not value then return nil end
  local word, known, entry = string.match(value, '^(%a+):(%x*):?(.*)$')
  if known ~= digest then return {'conflict', word} end
  return {word, entry}
end

local function add(seen_at, digest, seen_ttl, body_at, body_ttl, body, fields)
  if seen_at > 0 then
    local state = state_of(KEYS[seen_at], digest)
    if state then return state end
  end
  if length >= max_queue then return {'full', length} end
  if body_at > 0 then
    local set = {'SET', KEYS[body_at], body}
    if body_ttl > 0 then set[4], set[5] = 'PX', body_ttl end
    local stored = redis.pcall(unpack(set))
    if stored.err then return {'failed', stored.err} end
  end
  local entry = redis.pcall('XADD', lane, '*', unpack(fields))
  if type(entry) == 'table' then
    if body_at > 0 then redis.pcall('UNLINK', KEYS[body_at]) end
    return {'failed', entry.err}
  end
  length = length + 1
  if seen_at > 0 then
    redis.pcall('SET', KEYS[seen_at], 'queued:' .. digest .. ':' .. entry, 'PX', seen_ttl)
  end
  return {'added', entry}
end

for i = 1, tonumber(ARGV[2]) do
  local count = tonumber(ARGV[at + 6])
  local fields = {}
  for j = 1, count do fields[j] = ARGV[at + 6 + j] end
  results[i] = add(tonumber(ARGV[at]), ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]),
    tonumber(ARGV[at + 4]), ARGV[at + 5], fields)
  at = at + 7 + count
end
return {length, results}
