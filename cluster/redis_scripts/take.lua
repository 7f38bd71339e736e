-- A call of a tenant begins, if its limits allow it: requests per second, tokens per minute, places at once.
-- KEYS: rates, workers, places... (a hash of worker -> places taken, for each owner, the tenant first where it has a
--       limit, the function last), places of the tenant's other functions that have some kept for them...
-- ARGV: worker, places wanted, requests/s, tokens/min (empty: not limited), tokens, longest silence of a worker that
--       lives, lifetime of places, number of owners, places kept for the function, limit of each owner... (empty: not
--       limited), places kept for each other function...
-- Returns {0 allowed | 1 requests | 2 tokens | 3 first owner's places | 4 ..., milliseconds until it may be allowed}
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local wanted = tonumber(ARGV[2])

local function alive(worker)
  local beat = redis.call('ZSCORE', KEYS[2], worker)
  return beat and now - tonumber(beat) < tonumber(ARGV[6])
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

local last = 2 + tonumber(ARGV[8])  -- of the owners' keys
-- What is free of the places that are kept for others counts as taken, unless the function has kept ones itself.
local kept = 0
if #KEYS > last and taken_of(KEYS[last]) + wanted > tonumber(ARGV[9]) then
  for index = last + 1, #KEYS do
    kept = kept + math.max(0, tonumber(ARGV[index + 7]) - taken_of(KEYS[index]))
  end
end
for index = 3, last do
  local limit = tonumber(ARGV[index + 7])
  if limit then
    local held = index == 3 and kept or 0
    if taken_of(KEYS[index]) + held + wanted > limit then return {index, 0} end
  end
end

-- A bucket that is not there is full: it holds a second's requests (one at least), or a minute's tokens.
local stored = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
if stored[3] and tonumber(stored[3]) > now then  -- the clock was set back: it fills from now on
  redis.call('HSET', KEYS[1], 'at', now)
  stored[3] = now
end
local most = 1e9  -- seconds: of rates that allow next to nothing
local passed = stored[3] and math.max(0, now - tonumber(stored[3])) / 1000 or 0
local function level(kept, rate, capacity)
  if not kept then return capacity end
  return math.min(capacity, tonumber(kept) + passed * rate)
end

local rps, tpm = tonumber(ARGV[3]), tonumber(ARGV[4])
local left, full_in = {}, 0
if rps then
  local capacity = math.max(1, rps)
  local requests = level(stored[1], rps, capacity)
  if requests < 1 then return {1, math.ceil(math.min(most, (1 - requests) / rps) * 1000)} end
  left.requests = requests - 1
  full_in = (capacity - left.requests) / rps
end
if tpm then
  local rate, cost, capacity = tpm / 60, tonumber(ARGV[5]), math.max(1, tpm)
  local tokens = level(stored[2], rate, capacity)
  local needed = math.min(cost, capacity)
  if tokens < needed then return {2, math.ceil(math.min(most, (needed - tokens) / rate) * 1000)} end
  left.tokens = tokens - cost
  full_in = math.max(full_in, (capacity - left.tokens) / rate)
end

if rps or tpm then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'at', now)
  for name, value in pairs(left) do redis.call('HSET', KEYS[1], name, string.format('%.17g', value)) end
  redis.call('PEXPIRE', KEYS[1], math.ceil(math.min(most, full_in) * 1000) + 1000)
end
for index = 3, last do
  redis.call('HINCRBY', KEYS[index], ARGV[1], wanted)
  redis.call('PEXPIRE', KEYS[index], ARGV[7])
end
return {0, 0}
