-- KEYS lease, state; ARGV token. The next owner need not wait for the lease to end.
-- With owned.lua before it: ARGV[1] is the token of the lane's owner.
redis.call('HSET', KEYS[2], 'owner', '')
redis.call('DEL', KEYS[1])
return 1
