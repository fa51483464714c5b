-- KEYS stream, state, due; ARGV token, member, group, the id before the first to hand out.
-- With owned.lua before it: ARGV[1] is the token of the lane's owner.
redis.call('XGROUP', 'SETID', KEYS[1], ARGV[3], ARGV[4])
local page
repeat
    page = redis.call('XPENDING', KEYS[1], ARGV[3], '-', '+', 1000)
    for _, pending in ipairs(page) do redis.call('XACK', KEYS[1], ARGV[3], pending[1]) end
until #page == 0
redis.call('DEL', KEYS[3])
local epoch = redis.call('HINCRBY', KEYS[2], 'epoch', 1)
redis.call('HSET', KEYS[2], 'owner', epoch .. ' ' .. ARGV[2])
return epoch
