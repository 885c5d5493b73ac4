-- Gives back everything that a consumer holds: others may take it at once, and this delivery does
-- not count.
-- KEYS: the lanes high, normal, low.  ARGV: group, consumer, the consumer "returned", hint channel,
--   how many at most per lane.
-- Answers the number of entries given back.
local group, me, returned, channel, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local count = 0
for _, lane in ipairs(KEYS) do
  local rows = redis.pcall('XPENDING', lane, group, '-', '+', most, me)
  if not rows.err then
    for _, row in ipairs(rows) do
      redis.call('XCLAIM', lane, group, returned, 0, row[1], 'RETRYCOUNT', math.max(row[4] - 1, 0),
        'JUSTID')
      count = count + 1
    end
  end
end
if count > 0 then redis.pcall('PUBLISH', channel, 'returned') end
return count
