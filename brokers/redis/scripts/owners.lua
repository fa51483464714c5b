-- KEYS state, lease, state, lease...; ARGV whether to spare the silent.
-- Who has each lane; nobody has one whose owner stayed silent, unless the silent are spared.
local owners = {}
for lane = 1, #KEYS / 2 do
    local owner = redis.call('GET', KEYS[2 * lane])
    if not owner and ARGV[1] == '1' then
        owner = string.match(redis.call('HGET', KEYS[2 * lane - 1], 'owner') or '', ' (.*)')
    end
    owners[lane] = owner or ''
end
return cmsgpack.pack(owners)
