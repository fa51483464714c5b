-- KEYS stream, state, due; ARGV token, group, first id, most, connection.
-- A page of what is handed out or waits: id, count, milliseconds until due or false, key.
-- From now on nothing is read over an earlier connection; a server without memory goes unfenced.
-- With owned.lua before it: ARGV[1] is the token of the lane's owner.
if tonumber(redis.call('HGET', KEYS[2], 'connection') or 0) < tonumber(ARGV[5]) then
    redis.pcall('HSET', KEYS[2], 'connection', ARGV[5])
end
local time = redis.call('TIME')
local now, last, rows = time[1] * 1000 + time[2] / 1000, '0-0', {}
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local fact = {}
    for i = 1, #group, 2 do fact[group[i]] = group[i + 1] end
    if fact['name'] == ARGV[2] then last = fact['last-delivered-id'] end
end
local page = redis.call('XPENDING', KEYS[1], ARGV[2], ARGV[3], '+', ARGV[4])
for _, pending in ipairs(page) do
    local id, key = pending[1], false
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    if entry then
        for i = 1, #entry[2], 2 do
            if entry[2][i] == 'key' then key = entry[2][i + 1] end
        end
        local due = redis.call('ZSCORE', KEYS[3], id)
        rows[#rows + 1] = {id, pending[4], due and tonumber(due) - now, key}
    else
        redis.call('XACK', KEYS[1], ARGV[2], id)
        redis.call('ZREM', KEYS[3], id)
    end
end
return cmsgpack.pack({last, #page > 0 and page[#page][1] or false, rows})
