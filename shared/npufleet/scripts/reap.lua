-- Forgets consumers of workers that are gone for good: only those without a single pending entry,
-- since deleting a consumer drops its pending entries.
-- KEYS: the lanes high, normal, low; the live workers; the model's hash.
-- ARGV: group, the consumer "returned", age of a heartbeat that counts as gone (ms), what the hash
--   puts before a worker's name.
-- Answers the number of consumers deleted.
local group, returned, age = ARGV[1], ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local deleted = 0
for i = 1, 3 do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], group)
  for _, flat in ipairs(consumers.err and {} or consumers) do
    local row = {}
    for j = 1, #flat, 2 do row[flat[j]] = flat[j + 1] end
    local beat = redis.call('ZSCORE', KEYS[4], row.name)
    local gone = not beat or now - tonumber(beat) > age
    if row.name ~= returned and row.pending == 0 and row.idle > age and gone then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[i], group, row.name)
      deleted = deleted + 1
    end
  end
end
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now - age, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', KEYS[4], worker)
  redis.call('HDEL', KEYS[5], ARGV[4] .. worker)
end
return deleted
