-- A lease is taken or prolonged, given back, or looked at.
-- KEYS: lease
-- ARGV: take | free | look, holder, milliseconds
-- Returns {its holder then (empty: nobody), milliseconds left}
local held = redis.call('GET', KEYS[1])
if ARGV[1] == 'take' and (not held or held == ARGV[2]) then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return {ARGV[2], tonumber(ARGV[3])}
end
if ARGV[1] == 'free' and held == ARGV[2] then
  redis.call('DEL', KEYS[1])
  return {'', 0}
end
if not held then return {'', 0} end
return {held, redis.call('PTTL', KEYS[1])}
