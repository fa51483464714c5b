-- KEYS members, bell, alive; ARGV member, topics, session in ms, whether to spare the silent.
-- Stay alive, bury the dead, and tell the others if anything changed.
local changed, living = false, {}
if redis.call('PEXPIRE', KEYS[3] .. ARGV[1], ARGV[3]) == 0 then
    redis.call('SET', KEYS[3] .. ARGV[1], '', 'PX', ARGV[3])
end
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
    changed = true
end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    if ARGV[4] == '1' or redis.call('EXISTS', KEYS[3] .. all[i]) == 1 then
        living[#living + 1] = {all[i], all[i + 1]}
    else
        redis.call('HDEL', KEYS[1], all[i])
        changed = true
    end
end
if changed then redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'by', ARGV[1]) end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return cmsgpack.pack({last and last[1] or '0-0', living})
