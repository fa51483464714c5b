-- KEYS stream; ARGV an id. How many entries follow it, counted up to a bound, and the last one.
local count, last = 0, ARGV[1]
for _ = 1, 100 do
    local page = redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', 100)
    count = count + #page
    if #page < 100 then return {count, false} end
    last = page[#page][1]
end
return {count, last}
