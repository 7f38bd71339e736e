-- Owners' places are still taken: their counts are kept.
-- KEYS: places...
-- ARGV: lifetime of places
for index = 1, #KEYS do
  redis.call('PEXPIRE', KEYS[index], ARGV[1])
end
return 0
