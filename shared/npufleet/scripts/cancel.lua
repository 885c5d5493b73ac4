-- Marks ids as cancelled: workers answer them `cancelled` when they meet them, and run nothing.
-- KEYS: the cancelled ids.  ARGV: how long a mark is kept (ms), how many marks at most, ids.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now, ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[1]))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -tonumber(ARGV[2]) - 1)
return #ARGV - 2
