-- A worker's heartbeat for one model, by the server's clock.
-- KEYS: the live workers.  ARGV: consumer.  Answers the server time in ms.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
return now
