-- KEYS lease, state; ARGV token, member, session in ms. PEXPIRE works without free memory.
-- With owned.lua before it: ARGV[1] is the token of the lane's owner.
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return 1
