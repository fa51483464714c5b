-- KEYS stream, state, due; ARGV token, group, bytes, packed ids.
-- Hands out waiting entries; one that somebody deleted from the stream is settled.
-- With owned.lua before it: ARGV[1] is the token of the lane's owner.
local room, got, gone = tonumber(ARGV[3]), {}, {}
for _, id in ipairs(cmsgpack.unpack(ARGV[4])) do
    if room <= 0 then break end
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    redis.call('ZREM', KEYS[3], id)
    if entry then
        got[#got + 1] = entry
        for i = 2, #entry[2], 2 do room = room - #entry[2][i] end
    else
        redis.call('XACK', KEYS[1], ARGV[2], id)
        gone[#gone + 1] = id
    end
end
return cmsgpack.pack({got, gone})
