-- A request takes its charges from the buckets of a tenant: all of them, or none.
-- KEYS: buckets...
-- ARGV: rate per second and amount of each charge...
-- Returns {0 allowed | number of the first bucket that holds too little, milliseconds until it may be allowed}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local most = 1e9  -- seconds: of rates that allow next to nothing

-- A bucket that is not there is full: it holds a second's worth, one at least.
local left, full_in = {}, {}
for index = 1, #KEYS do
  local rate, amount = tonumber(ARGV[2 * index - 1]), tonumber(ARGV[2 * index])
  local capacity = math.max(1, rate)
  local stored = redis.call('HMGET', KEYS[index], 'level', 'at')
  local level = capacity
  if stored[1] then
    local at = math.min(tonumber(stored[2]), now)  -- less: the clock was set back, and it fills from now on
    if at < tonumber(stored[2]) then redis.call('HSET', KEYS[index], 'at', now) end
    level = math.min(capacity, tonumber(stored[1]) + (now - at) / 1000 * rate)
  end
  local needed = math.min(amount, capacity)
  if level < needed then return {index, math.ceil(math.min(most, (needed - level) / rate) * 1000)} end
  left[index] = level - amount
  full_in[index] = (capacity - left[index]) / rate
end
for index, key in ipairs(KEYS) do
  redis.call('HSET', key, 'at', now, 'level', string.format('%.17g', left[index]))
  redis.call('PEXPIRE', key, math.ceil(math.min(most, full_in[index]) * 1000) + 1000)
end
return {0, 0}
