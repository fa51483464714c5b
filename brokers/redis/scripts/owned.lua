-- KEYS .., state; ARGV token. Nothing is done for a member that lost the lane.
if redis.call('HGET', KEYS[2], 'owner') ~= ARGV[1] then return false end
