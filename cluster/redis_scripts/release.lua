-- A place is given back, if it is still held.
-- KEYS: node, ends, demands, version
-- ARGV: request, payload, channel
-- Returns 1 when it was held
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('HDEL', KEYS[3], ARGV[1])
local generation = redis.call('HGET', KEYS[1], 'generation') or '0'
local version = redis.call('INCR', KEYS[4])
redis.call('PUBLISH', ARGV[3], string.format('%.0f:', version) .. generation .. ':0:' .. ARGV[2])
return 1
