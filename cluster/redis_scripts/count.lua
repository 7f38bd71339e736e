-- What a worker has counted is added to sums by slices of time; it was counted some time ago, by this server's clock.
-- KEYS: the last number that the worker reported, what it sees of the pools' loads
-- ARGV: number, 1 when it begins to report all within its windows, expiry of the loads, loads, JSON: of each kind of sums
--       {what its keys begin with, seconds per slice, slices, most names in one, {{name, seconds ago, numbers}, ...}}
-- Returns 1 added | 0 it was before | -1 the worker's counts are not known: it must report all
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[3])
local last = redis.call('GET', KEYS[1])
if not last and ARGV[2] == '0' then return -1 end
if last and tonumber(last) >= tonumber(ARGV[1]) then return 0 end

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local longest = 0
for _, kind in ipairs(cjson.decode(ARGV[5])) do
  local prefix, seconds, slices, most, counted = unpack(kind)
  longest = math.max(longest, seconds * slices)
  for _, each in ipairs(counted) do
    local name, ago, numbers = unpack(each)
    local slice = math.floor((now - ago) / seconds)
    local key = prefix .. string.format('%.0f', slice)
    local known = redis.call('HGET', key, name)
    if known or redis.call('HLEN', key) < most then
      for index, number in ipairs(known and cjson.decode(known) or {}) do
        numbers[index] = numbers[index] + number
      end
      redis.call('HSET', key, name, cjson.encode(numbers))
      redis.call('PEXPIREAT', key, string.format('%.0f', (slice + slices) * seconds * 1000))
    end
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', longest)
return 1
