-- Renews the leases that a consumer still owns; never takes an entry back from a new owner.
-- KEYS: the lanes high, normal, low.  ARGV: group, consumer, then pairs (lane index, entry id).
-- Answers pairs (lane index, entry id), flat, of those that it owns no more.
local group, me, lost = ARGV[1], ARGV[2], {}
for i = 3, #ARGV, 2 do
  local lane, entry = KEYS[tonumber(ARGV[i])], ARGV[i + 1]
  local row = redis.pcall('XPENDING', lane, group, entry, entry, 1, me)
  if row.err or not row[1] then
    lost[#lost + 1] = tonumber(ARGV[i])
    lost[#lost + 1] = entry
  else
    redis.call('XCLAIM', lane, group, me, 0, entry, 'JUSTID')
  end
end
return lost
