-- KEYS stream; ARGV group. How many entries are pending, how many were never read (false when
-- the server cannot tell), and the last one that was read.
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0, ''} end
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local fact = {}
    for i = 1, #group, 2 do fact[group[i]] = group[i + 1] end
    if fact['name'] == ARGV[1] then
        return {fact['pending'], fact['lag'] or false, fact['last-delivered-id']}
    end
end
return {0, redis.call('XLEN', KEYS[1]), ''}
