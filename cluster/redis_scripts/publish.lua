-- News of a node come in. Times are milliseconds of this server's clock.
-- KEYS: nodes, node, ends, demands, version, residents
-- ARGV: id, epoch, seq, heartbeat, facts (nil in msgpack: as they were), changes, queued, queue limit, age, channel, most
--       nodes, time after which a node is forgotten, past epochs remembered, number of the change behind which the
--       changes begin (-1: they are everything), number of the last one, number of the last place that became a request,
--       which of those before it did, silence after which a process that was replaced counts again, then digest and
--       resident (empty: it is gone) of each that changed...
-- Returns {1 taken | 0 older than what is known | -1 too many nodes | -2 they build on what is not known, version}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local counted = time[1] .. string.format('%06d', tonumber(time[2]))
local forget, since = tonumber(ARGV[12]), tonumber(ARGV[14])
local NIL = '\192'
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - forget)

local known = redis.call('HMGET', KEYS[2], 'epoch', 'seq', 'past', 'at', 'heard')
local past = known[3] and cjson.decode(known[3]) or {}
if not known[1] then
  if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[11]) then return {-1, 0} end
elseif known[1] == ARGV[2] then
  if tonumber(ARGV[3]) <= tonumber(known[2]) then return {0, 0} end
else
  for index, epoch in ipairs(past) do
    if epoch == ARGV[2] then
      if now - tonumber(known[5]) < tonumber(ARGV[18]) then return {0, 0} end
      table.remove(past, index)
      break
    end
  end
end
if since < 0 then
  if ARGV[5] == NIL then return {-2, 0} end
elseif known[1] ~= ARGV[2] or since > tonumber(known[4]) then
  return {-2, 0}
end
if known[1] and known[1] ~= ARGV[2] then
  table.insert(past, known[1])
  if #past > tonumber(ARGV[13]) then table.remove(past, 1) end
  redis.call('DEL', KEYS[3], KEYS[4])
end

local heard, at = now - tonumber(ARGV[9]), tonumber(ARGV[15])
if since >= 0 then at = math.max(at, tonumber(known[4])) end
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'seq', ARGV[3], 'beat', ARGV[4], 'queued', ARGV[7],
  'at', string.format('%.0f', at), 'heard', heard)
if ARGV[5] ~= NIL then redis.call('HSET', KEYS[2], 'facts', ARGV[5], 'limit', ARGV[8]) end
if #past > 0 then redis.call('HSET', KEYS[2], 'past', cjson.encode(past)) end
-- Numbers of places are counted from the clock, so that they never come again after the server was emptied.
redis.call('HSETNX', KEYS[2], 'places', counted)
redis.call('PEXPIRE', KEYS[2], forget)
redis.call('ZADD', KEYS[1], heard, ARGV[1])
redis.call('PEXPIRE', KEYS[1], forget)

if since < 0 then redis.call('DEL', KEYS[6]) end
for index = 19, #ARGV, 2 do
  if ARGV[index + 1] == '' then
    redis.call('HDEL', KEYS[6], ARGV[index])
  else
    redis.call('HSET', KEYS[6], ARGV[index], ARGV[index + 1])
  end
end
redis.call('PEXPIRE', KEYS[6], forget)

local function free(request)
  redis.call('ZREM', KEYS[3], request)
  redis.call('HDEL', KEYS[4], request)
end
local last, came = tonumber(ARGV[16]), ARGV[17]
local held = redis.call('HGETALL', KEYS[4])
for index = 1, #held, 2 do
  local number = tonumber(string.match(held[index + 1], '^%d+'))
  local age = last - number
  local byte = age >= 0 and age < 256 and string.byte(came, #came - math.floor(age / 8)) or 0
  if number > 0 and (age >= 256 or bit.band(byte, bit.lshift(1, age % 8)) ~= 0) then free(held[index]) end
end

redis.call('SET', KEYS[5], counted, 'NX')
local version = redis.call('INCR', KEYS[5])
local generation = redis.call('HGET', KEYS[2], 'generation') or '0'
redis.call('PUBLISH', ARGV[10], string.format('%.0f', version) .. ':' .. generation .. ':0:' ..
  '\148\163put' .. ARGV[4] .. ARGV[5] .. ARGV[6])
return {1, version}
