-- A call of a tenant begins, if its limits allow it: tokens per minute, places at once.
-- KEYS: rates, workers, places... (a hash of worker -> places taken, for each owner, the tenant first where it has a
--       limit, the function last), places of the tenant's other functions that have some kept for them...
-- ARGV: worker, places wanted, tokens/min (empty: not limited), tokens, longest silence of a worker that lives, lifetime
--       of places, number of owners, places kept for the function, limit of each owner... (empty: not limited), places
--       kept for each other function...
-- Returns {0 allowed | 1 tokens | 2 first owner's places | 3 ..., milliseconds until it may be allowed}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local wanted = tonumber(ARGV[2])

local function alive(worker)
  local beat = redis.call('ZSCORE', KEYS[2], worker)
  return beat and now - tonumber(beat) < tonumber(ARGV[5])
end

local function taken_of(key)
  local taken = 0
  local counts = redis.call('HGETALL', key)
  for pair = 1, #counts, 2 do
    if counts[pair] == ARGV[1] or alive(counts[pair]) then
      taken = taken + tonumber(counts[pair + 1])
    else
      redis.call('HDEL', key, counts[pair])
    end
  end
  return taken
end

local last = 2 + tonumber(ARGV[7])  -- of the owners' keys
-- What is free of the places that are kept for others counts as taken, unless the function has kept ones itself.
local kept = 0
if #KEYS > last and taken_of(KEYS[last]) + wanted > tonumber(ARGV[8]) then
  for index = last + 1, #KEYS do
    kept = kept + math.max(0, tonumber(ARGV[index + 6]) - taken_of(KEYS[index]))
  end
end
for index = 3, last do
  local limit = tonumber(ARGV[index + 6])
  if limit then
    local held = index == 3 and kept or 0
    if taken_of(KEYS[index]) + held + wanted > limit then return {index - 1, 0} end
  end
end

-- A bucket that is not there is full: it holds a minute's tokens.
local tpm = tonumber(ARGV[3])
if tpm then
  local rate, cost, capacity = tpm / 60, tonumber(ARGV[4]), math.max(1, tpm)
  local most = 1e9  -- seconds: of rates that allow next to nothing
  local stored = redis.call('HMGET', KEYS[1], 'tokens', 'at')
  local tokens = capacity
  if stored[1] and stored[2] then
    local at = math.min(tonumber(stored[2]), now)  -- less: the clock was set back, and it fills from now on
    if at < tonumber(stored[2]) then redis.call('HSET', KEYS[1], 'at', now) end
    tokens = math.min(capacity, tonumber(stored[1]) + (now - at) / 1000 * rate)
  end
  local needed = math.min(cost, capacity)
  if tokens < needed then return {1, math.ceil(math.min(most, (needed - tokens) / rate) * 1000)} end
  redis.call('HSET', KEYS[1], 'at', now, 'tokens', string.format('%.17g', tokens - cost))
  local full_in = (capacity - tokens + cost) / rate
  redis.call('PEXPIRE', KEYS[1], math.ceil(math.min(most, full_in) * 1000) + 1000)
end

for index = 3, last do
  redis.call('HINCRBY', KEYS[index], ARGV[1], wanted)
  redis.call('PEXPIRE', KEYS[index], ARGV[6])
end
return {0, 0}
