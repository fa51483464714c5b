-- KEYS members, bell, alive; ARGV member.
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3] .. ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'by', ARGV[1])
return 1
