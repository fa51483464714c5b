-- KEYS stream...; ARGV per message: the number of its stream, how many fields and values
-- follow, and these. An error other than a stream's own comes before anything is written.
local ids, at, written = {}, 1, false
while ARGV[at] do
    local width = tonumber(ARGV[at + 1])
    local id = redis.pcall('XADD', KEYS[tonumber(ARGV[at])], '*',
        unpack(ARGV, at + 2, at + 1 + width))
    if type(id) == 'table' and id.err then
        if not written and not string.find(id.err, 'WRONGTYPE') then return id end
        id = '!' .. id.err
    else
        written = true
    end
    ids[#ids + 1] = id
    at = at + 2 + width
end
return cmsgpack.pack(ids)
