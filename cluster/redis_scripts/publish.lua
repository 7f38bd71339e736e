-- A node's record comes in. Times are milliseconds of this server's clock.
-- KEYS: nodes, node, ends, demands, version
-- ARGV: id, epoch, seq, payload, queued, queue limit, age, channel, most nodes, time after which a node is forgotten,
--       past epochs remembered, acknowledged requests...
-- Returns {1 taken | 0 older than what is known | -1 too many nodes, version}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local forget = tonumber(ARGV[10])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - forget)

local known = redis.call('HMGET', KEYS[2], 'epoch', 'seq', 'past')
local past = known[3] and cjson.decode(known[3]) or {}
if not known[1] then
  if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[9]) then return {-1, 0} end
elseif known[1] == ARGV[2] then
  if tonumber(ARGV[3]) <= tonumber(known[2]) then return {0, 0} end
else
  for _, epoch in ipairs(past) do
    if epoch == ARGV[2] then return {0, 0} end
  end
  table.insert(past, known[1])
  if #past > tonumber(ARGV[11]) then table.remove(past, 1) end
  redis.call('DEL', KEYS[3], KEYS[4])
end

local heard = now - tonumber(ARGV[7])
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'seq', ARGV[3], 'payload', ARGV[4], 'queued', ARGV[5],
  'limit', ARGV[6], 'heard', heard)
if #past > 0 then redis.call('HSET', KEYS[2], 'past', cjson.encode(past)) end
redis.call('PEXPIRE', KEYS[2], forget)
redis.call('ZADD', KEYS[1], heard, ARGV[1])
redis.call('PEXPIRE', KEYS[1], forget)
for index = 12, #ARGV do
  redis.call('ZREM', KEYS[3], ARGV[index])
  redis.call('HDEL', KEYS[4], ARGV[index])
end

-- Counted from the clock, so that versions never come again after the server was emptied.
redis.call('SET', KEYS[5], time[1] .. string.format('%06d', tonumber(time[2])), 'NX')
local version = redis.call('INCR', KEYS[5])
local generation = redis.call('HGET', KEYS[2], 'generation') or '0'
redis.call('PUBLISH', ARGV[8], string.format('%.0f', version) .. ':' .. generation .. ':' .. ARGV[4])
return {1, version}
