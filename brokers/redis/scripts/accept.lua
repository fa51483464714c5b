-- KEYS stream, state, due; ARGV token, group, packed ids.
-- With owned.lua before it: ARGV[1] is the token of the lane's owner.
local ids, waits = cmsgpack.unpack(ARGV[3]), redis.call('EXISTS', KEYS[3]) == 1
for first = 1, #ids, 1000 do
    local last = math.min(first + 999, #ids)
    redis.call('XACK', KEYS[1], ARGV[2], unpack(ids, first, last))
    if waits then redis.call('ZREM', KEYS[3], unpack(ids, first, last)) end
end
return 1
