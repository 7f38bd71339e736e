-- Sums over some slices of time.
-- KEYS: what the slices' keys begin with
-- ARGV: seconds per slice, name (empty: all), the newest slice (empty: now's), ages of the first and of the last slice
-- Returns {the newest slice, JSON: {name: numbers, ...}}
local newest = tonumber(ARGV[3]) or math.floor(tonumber(redis.call('TIME')[1]) / tonumber(ARGV[1]))
local sums = {}
for age = tonumber(ARGV[4]), tonumber(ARGV[5]) do
  local key = KEYS[1] .. string.format('%.0f', newest - age)
  local found = ARGV[2] == '' and redis.call('HGETALL', key) or {ARGV[2], redis.call('HGET', key, ARGV[2])}
  for index = 1, #found, 2 do
    local numbers = found[index + 1] and cjson.decode(found[index + 1])
    for place, number in ipairs(numbers and sums[found[index]] or {}) do
      numbers[place] = numbers[place] + number
    end
    sums[found[index]] = numbers or sums[found[index]]
  end
end
return {newest, cjson.encode(sums)}
