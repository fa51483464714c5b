-- KEYS stream, state, lease; ARGV member, group, session in ms, whether to spare the silent.
-- A lane that nobody holds is ours, under a new epoch.
local leased = redis.call('GET', KEYS[3])
if leased and leased ~= ARGV[1] then return false end
local owner = redis.call('HGET', KEYS[2], 'owner') or ''
local silent = owner ~= '' and string.sub(owner, -#ARGV[1]) ~= ARGV[1]
if silent and ARGV[4] == '1' then return false end
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
local epoch = redis.call('HINCRBY', KEYS[2], 'epoch', 1)
redis.call('HSET', KEYS[2], 'owner', epoch .. ' ' .. ARGV[1], 'connection', 0)
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3])
return epoch
