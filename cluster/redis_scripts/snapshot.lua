-- All nodes, and the places held on them.
-- KEYS: nodes, version
-- ARGV: what the keys of a node, of its ends, of its demands and of its residents begin with
-- Returns {version, {beat, facts, number of the last change, age, generation, {time left, place, ...}, residents}, ...}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local found = {tonumber(redis.call('GET', KEYS[2]) or '0')}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local node = redis.call('HMGET', ARGV[1] .. id, 'beat', 'facts', 'at', 'heard', 'generation')
  if node[1] and node[2] then
    local held = {}
    local ends = redis.call('ZRANGEBYSCORE', ARGV[2] .. id, '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES')
    for index = 1, #ends, 2 do
      local payload = redis.call('HGET', ARGV[3] .. id, ends[index])
      if payload then
        table.insert(held, tonumber(ends[index + 1]) - now)
        table.insert(held, payload)
      end
    end
    table.insert(found, {node[1], node[2], tonumber(node[3]), math.max(0, now - tonumber(node[4])),
      tonumber(node[5] or '0'), held, redis.call('HVALS', ARGV[4] .. id)})
  end
end
return found
