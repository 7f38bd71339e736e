-- What the other workers see of the pools' loads.
-- KEYS: workers
-- ARGV: what the keys of their loads begin with, the worker that asks
-- Returns what each has told lately
local found = {}
for _, worker in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local told = worker ~= ARGV[2] and redis.call('GET', ARGV[1] .. worker)
  if told then table.insert(found, told) end
end
return found
