-- KEYS stream; ARGV newest id to delete, most, whether only to count. Keeps all that any group has
-- not settled, and the whole stream while there is no group.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local function parts(id)
    local ms, seq = string.match(id, '(%d+)-(%d+)')
    return ms, seq
end
local function before(a, b)
    local am, as = parts(a)
    local bm, bs = parts(b)
    if #am ~= #bm then return #am < #bm end
    if am ~= bm then return am < bm end
    if #as ~= #bs then return #as < #bs end
    return as < bs
end
local groups, keep = redis.call('XINFO', 'GROUPS', KEYS[1]), ARGV[1]
if #groups == 0 then return 0 end
for _, group in ipairs(groups) do
    local fact = {}
    for i = 1, #group, 2 do fact[group[i]] = group[i + 1] end
    local bound = redis.call('XPENDING', KEYS[1], fact['name'])[2] or fact['last-delivered-id']
    if before(bound, keep) then keep = bound end
end
local most = tonumber(ARGV[2])
if ARGV[3] == '1' then
    local count, last = 0, '-'
    while count < most do
        local page = redis.call('XRANGE', KEYS[1], last, '+', 'COUNT', 500)
        for _, entry in ipairs(page) do
            if not before(entry[1], keep) then return count end
            count, last = count + 1, '(' .. entry[1]
        end
        if #page < 500 then break end
    end
    return count
end
local cut = redis.call('XTRIM', KEYS[1], 'MINID', '~', keep, 'LIMIT', most)
if cut + 100 <= most then cut = cut + redis.call('XTRIM', KEYS[1], 'MINID', keep) end
return cut
