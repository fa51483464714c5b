-- KEYS stream, state, stream, state...; ARGV limit, bytes, group, consumer, connection, token...
-- Reads what was never handed out, lane by lane, until enough messages or bytes are together.
-- A lane whose group somebody deleted is lost: who takes it next makes the group anew.
-- So it is for a read that comes late, over an earlier connection: nobody would hear the answer.
local left, room, lost, got = tonumber(ARGV[1]), tonumber(ARGV[2]), {}, {}
for lane = 1, #KEYS / 2 do
    local stream = KEYS[2 * lane - 1]
    local state = redis.call('HMGET', KEYS[2 * lane], 'owner', 'connection')
    if state[1] ~= ARGV[5 + lane] or tonumber(state[2] or 0) > tonumber(ARGV[5]) then
        lost[#lost + 1] = lane
    else
        local entries, asked, more = {}, 0, true
        while more and left > 0 and room > 0 do
            asked = math.min(left, 100)
            local answer = redis.pcall('XREADGROUP', 'GROUP', ARGV[3], ARGV[4],
                'COUNT', asked, 'STREAMS', stream, '>')
            if answer and answer.err then
                if not string.find(answer.err, 'NOGROUP') then return answer end
                redis.call('HDEL', KEYS[2 * lane], 'owner')
                lost[#lost + 1] = lane
            end
            local page = answer and answer[1] and answer[1][2] or {}
            for _, entry in ipairs(page) do
                entries[#entries + 1] = entry
                local fields = entry[2]
                for i = 2, #fields, 2 do room = room - #fields[i] end
            end
            left, more = left - #page, #page == asked
        end
        if #entries > 0 then got[#got + 1] = {lane, entries} end
    end
end
return cmsgpack.pack({lost, got})
