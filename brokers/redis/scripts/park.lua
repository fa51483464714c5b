-- KEYS stream, state, due; ARGV token, group, consumer, delay in ms, packed {id, count} pairs.
-- Entries wait from now on, with the count that their next delivery will carry.
-- With owned.lua before it: ARGV[1] is the token of the lane's owner.
local time = redis.call('TIME')
local due = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[4])
for _, pair in ipairs(cmsgpack.unpack(ARGV[5])) do
    local held = redis.call('XPENDING', KEYS[1], ARGV[2], pair[1], pair[1], 1)
    if #held > 0 then
        redis.call('ZADD', KEYS[3], due, pair[1])
        redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[3], 0, pair[1],
            'RETRYCOUNT', pair[2], 'JUSTID')
    end
end
return 1
