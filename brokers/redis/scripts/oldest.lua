-- KEYS stream; ARGV group, the last entry that it read. The oldest entry that is pending, the first
-- that was never read, and the last of all; false where there is none.
local held = redis.pcall('XPENDING', KEYS[1], ARGV[1])
local unread = redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', 1)[1]
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
return {not held.err and held[2] or false, unread and unread[1] or false, last and last[1] or false}
