-- What a worker has taken of one owner's places, after it could not tell for a while.
-- KEYS: places
-- ARGV: worker, places, lifetime of places
if tonumber(ARGV[2]) > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return 0
