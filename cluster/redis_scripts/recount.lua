-- What a worker has taken of owners' places, after it could not report for a while, or after they were lost.
-- KEYS: places...
-- ARGV: worker, lifetime of places, places taken of each
for index = 1, #KEYS do
  local taken = tonumber(ARGV[index + 2])
  if taken > 0 then
    redis.call('HSET', KEYS[index], ARGV[1], taken)
    redis.call('PEXPIRE', KEYS[index], ARGV[2])
  else
    redis.call('HDEL', KEYS[index], ARGV[1])
  end
end
return 0
