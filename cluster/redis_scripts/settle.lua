-- A call has ended: its places are free, and tokens that it did not use are given back.
-- KEYS: rates, places...
-- ARGV: worker, places, tokens to give back, tokens/min (empty: not limited)
for index = 2, #KEYS do
  if redis.call('HINCRBY', KEYS[index], ARGV[1], -tonumber(ARGV[2])) <= 0 then
    redis.call('HDEL', KEYS[index], ARGV[1])
  end
end
local tpm = tonumber(ARGV[4])
local tokens = redis.call('HGET', KEYS[1], 'tokens')
if tpm and tokens then
  local left = math.min(math.max(1, tpm), tonumber(tokens) + tonumber(ARGV[3]))
  redis.call('HSET', KEYS[1], 'tokens', string.format('%.17g', left))
end
return 0
