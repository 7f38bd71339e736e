-- A gateway worker lives.
-- KEYS: workers, version
-- ARGV: worker, time after which a silent one is forgotten, time after which it counts as ended
-- Returns the version of the snapshot of the nodes, and how many workers live
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
-- The clock was set back: from now on those of a later time are as silent as any other.
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf')) do
  redis.call('ZADD', KEYS[1], now, worker)
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local living = redis.call('ZCOUNT', KEYS[1], string.format('%.0f', now - tonumber(ARGV[3])), '+inf')
return {tonumber(redis.call('GET', KEYS[2]) or '0'), living}
