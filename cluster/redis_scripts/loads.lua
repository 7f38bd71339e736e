-- What the other workers see of the pools' loads.
-- KEYS: workers
-- ARGV: what the keys of their loads begin with, the worker that asks
-- Returns what each has reported lately
local found = {}
for _, worker in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local load = worker ~= ARGV[2] and redis.call('GET', ARGV[1] .. worker)
  if load then table.insert(found, load) end
end
return found
