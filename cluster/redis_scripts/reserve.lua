-- A place on a node is taken, if it lives, has one free, and nobody took one since the caller looked.
-- KEYS: node, ends, demands, version
-- ARGV: request, payload, generation that was seen (empty: any), expiry of records, length of a reservation, channel,
--       places beyond the queue's limit that it may take
-- Returns {1 taken | 0 full, silent or changed | -1 unknown node, version, generation, number of the place}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local node = redis.call('HMGET', KEYS[1], 'heard', 'generation', 'queued', 'limit')
if not node[1] then return {-1, 0, 0, 0} end
local generation = node[2] or '0'

-- Over, or of a time before the clock was set back.
local length = tonumber(ARGV[5])
local held = redis.call('ZCARD', KEYS[2])
local first, last = string.format('(%.0f', now), string.format('%.0f', now + length)
if held > 0 and redis.call('ZCOUNT', KEYS[2], first, last) < held then
  for _, span in ipairs({{'-inf', now}, {'(' .. last, '+inf'}}) do
    for _, request in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], span[1], span[2])) do
      redis.call('HDEL', KEYS[3], request)
    end
    redis.call('ZREMRANGEBYSCORE', KEYS[2], span[1], span[2])
  end
  held = redis.call('ZCARD', KEYS[2])
end
if now - tonumber(node[1]) >= tonumber(ARGV[4]) or tonumber(node[3]) + held >= tonumber(node[4]) + tonumber(ARGV[7])
  or (ARGV[3] ~= '' and ARGV[3] ~= generation) then
  return {0, tonumber(redis.call('GET', KEYS[4]) or '0'), tonumber(generation), 0}
end

redis.call('ZADD', KEYS[2], now + length, ARGV[1])
local number = string.format('%.0f', redis.call('HINCRBY', KEYS[1], 'places', 1))
redis.call('HSET', KEYS[3], ARGV[1], number .. ':' .. ARGV[2])
redis.call('PEXPIRE', KEYS[2], length)
redis.call('PEXPIRE', KEYS[3], length)
local taken = redis.call('HINCRBY', KEYS[1], 'generation', 1)
local version = redis.call('INCR', KEYS[4])
redis.call('PUBLISH', ARGV[6], string.format('%.0f:%.0f:', version, taken) .. number .. ':' .. ARGV[2])
return {1, version, taken, tonumber(number)}
