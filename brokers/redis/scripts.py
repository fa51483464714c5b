"""The Lua scripts: each is one atomic step, and none acts for a member that lost the lane.

Answers are packed by cmsgpack into one string, which is decoded in C here; a reply of
nested arrays would be taken apart piece by piece in Python. Commands that need free memory
come before those that do not, so that a full server refuses a step before it has begun.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Script(NamedTuple):
    """A script, and the name by which a server that has loaded it knows it."""

    text: str
    sha: str


def _script(text: str) -> Script:
    # Redis names a script by its SHA-1; nothing here relies on it for safety.
    return Script(text, hashlib.sha1(text.encode()).hexdigest())  # noqa: S324


_OWNED = """
if redis.call('HGET', KEYS[2], 'owner') ~= ARGV[1] then return false end
"""

# KEYS stream...; ARGV per message: the number of its stream, how many fields and values
# follow, and these. An error other than a stream's own comes before anything is written.
PUBLISH = _script("""
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
""")

# KEYS stream, state, stream, state...; ARGV limit, bytes, group, consumer, token...
# Reads what was never handed out, lane by lane, until enough messages or bytes are together.
# A lane whose group somebody deleted is lost: who takes it next makes the group anew.
READ = _script("""
local left, room, lost, got = tonumber(ARGV[1]), tonumber(ARGV[2]), {}, {}
for lane = 1, #KEYS / 2 do
    local stream = KEYS[2 * lane - 1]
    if redis.call('HGET', KEYS[2 * lane], 'owner') ~= ARGV[4 + lane] then
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
""")

# KEYS stream, state, due; ARGV token, group, bytes, packed ids.
# Hands out waiting entries; one that somebody deleted from the stream is settled.
AGAIN = _script(
    _OWNED
    + """
local room, got, gone = tonumber(ARGV[3]), {}, {}
for _, id in ipairs(cmsgpack.unpack(ARGV[4])) do
    if room <= 0 then break end
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    redis.call('ZREM', KEYS[3], id)
    if entry then
        got[#got + 1] = entry
        for i = 2, #entry[2], 2 do room = room - #entry[2][i] end
    else
        redis.call('XACK', KEYS[1], ARGV[2], id)
        gone[#gone + 1] = id
    end
end
return cmsgpack.pack({got, gone})
"""
)

# KEYS stream, state, due; ARGV token, group, first id, most.
# A page of what is handed out or waits: id, count, milliseconds until due or false, key.
PENDING = _script(
    _OWNED
    + """
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
"""
)

# KEYS stream, state, due; ARGV token, group, consumer, delay in ms, packed {id, count} pairs.
# Entries wait from now on, with the count that their next delivery will carry.
PARK = _script(
    _OWNED
    + """
local time = redis.call('TIME')
local due = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[4])
for _, pair in ipairs(cmsgpack.unpack(ARGV[5])) do
    local held = redis.call('XPENDING', KEYS[1], ARGV[2], pair[1], pair[1], 1)
    if #held > 0 then
        redis.call('ZADD', KEYS[3], due, pair[1])
        redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[3], 0, pair[1],
            'RETRYCOUNT', pair[2], 'JUSTID')
    end
end
return 1
"""
)

# KEYS stream, state, due; ARGV token, group, packed ids.
ACCEPT = _script(
    _OWNED
    + """
local ids, waits = cmsgpack.unpack(ARGV[3]), redis.call('EXISTS', KEYS[3]) == 1
for first = 1, #ids, 1000 do
    local last = math.min(first + 999, #ids)
    redis.call('XACK', KEYS[1], ARGV[2], unpack(ids, first, last))
    if waits then redis.call('ZREM', KEYS[3], unpack(ids, first, last)) end
end
return 1
"""
)

# KEYS stream, state, due; ARGV token, member, group, the id before the first to hand out.
SEEK = _script(
    _OWNED
    + """
redis.call('XGROUP', 'SETID', KEYS[1], ARGV[3], ARGV[4])
local page
repeat
    page = redis.call('XPENDING', KEYS[1], ARGV[3], '-', '+', 1000)
    for _, pending in ipairs(page) do redis.call('XACK', KEYS[1], ARGV[3], pending[1]) end
until #page == 0
redis.call('DEL', KEYS[3])
local epoch = redis.call('HINCRBY', KEYS[2], 'epoch', 1)
redis.call('HSET', KEYS[2], 'owner', epoch .. ' ' .. ARGV[2])
return epoch
"""
)

# KEYS stream, state, lease; ARGV member, group, session in ms, whether to spare the silent.
# A lane that nobody holds is ours, under a new epoch.
TAKE = _script("""
local leased = redis.call('GET', KEYS[3])
if leased and leased ~= ARGV[1] then return false end
local owner = redis.call('HGET', KEYS[2], 'owner') or ''
local silent = owner ~= '' and string.sub(owner, -#ARGV[1]) ~= ARGV[1]
if silent and ARGV[4] == '1' then return false end
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[2], '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
local epoch = redis.call('HINCRBY', KEYS[2], 'epoch', 1)
redis.call('HSET', KEYS[2], 'owner', epoch .. ' ' .. ARGV[1])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3])
return epoch
""")

# KEYS stream; ARGV group. The group starts at the beginning of the stream.
INTRODUCE = _script("""
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err and not string.find(made.err, 'BUSYGROUP') then return made end
return 1
""")

# KEYS lease, state; ARGV token, member, session in ms. PEXPIRE works without free memory.
RENEW = _script(
    _OWNED
    + """
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return 1
"""
)

# KEYS lease, state; ARGV token. The next owner need not wait for the lease to end.
FREE = _script(
    _OWNED
    + """
redis.call('HSET', KEYS[2], 'owner', '')
redis.call('DEL', KEYS[1])
return 1
"""
)

# KEYS state, lease, state, lease...; ARGV whether to spare the silent.
# Who has each lane; nobody has one whose owner stayed silent, unless the silent are spared.
OWNERS = _script("""
local owners = {}
for lane = 1, #KEYS / 2 do
    local owner = redis.call('GET', KEYS[2 * lane])
    if not owner and ARGV[1] == '1' then
        owner = string.match(redis.call('HGET', KEYS[2 * lane - 1], 'owner') or '', ' (.*)')
    end
    owners[lane] = owner or ''
end
return cmsgpack.pack(owners)
""")

# KEYS members, bell, alive; ARGV member, topics, session in ms, whether to spare the silent.
# Stay alive, bury the dead, and tell the others if anything changed.
LOOK = _script("""
local changed, living = false, {}
if redis.call('PEXPIRE', KEYS[3] .. ARGV[1], ARGV[3]) == 0 then
    redis.call('SET', KEYS[3] .. ARGV[1], '', 'PX', ARGV[3])
end
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
    changed = true
end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    if ARGV[4] == '1' or redis.call('EXISTS', KEYS[3] .. all[i]) == 1 then
        living[#living + 1] = {all[i], all[i + 1]}
    else
        redis.call('HDEL', KEYS[1], all[i])
        changed = true
    end
end
if changed then redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'by', ARGV[1]) end
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return cmsgpack.pack({last and last[1] or '0-0', living})
""")

# KEYS members, bell, alive; ARGV member.
LEAVE = _script("""
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3] .. ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'by', ARGV[1])
return 1
""")

# KEYS stream; ARGV group. How many entries are pending, how many were never read (false when
# the server cannot tell), and the last one that was read.
GROUP = _script("""
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0, ''} end
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local fact = {}
    for i = 1, #group, 2 do fact[group[i]] = group[i + 1] end
    if fact['name'] == ARGV[1] then
        return {fact['pending'], fact['lag'] or false, fact['last-delivered-id']}
    end
end
return {0, redis.call('XLEN', KEYS[1]), ''}
""")

# KEYS stream; ARGV an id. How many entries follow it, counted up to a bound, and the last one.
COUNT = _script("""
local count, last = 0, ARGV[1]
for _ = 1, 100 do
    local page = redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', 100)
    count = count + #page
    if #page < 100 then return {count, false} end
    last = page[#page][1]
end
return {count, last}
""")

# KEYS stream; ARGV newest id to delete, most, whether only to count. Keeps all that any group has
# not settled, and the whole stream while there is no group.
PRUNE = _script("""
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
""")

ALL = (
    PUBLISH, READ, AGAIN, PENDING, PARK, ACCEPT, SEEK, TAKE, INTRODUCE, RENEW, FREE, OWNERS,
    LOOK, LEAVE, GROUP, COUNT, PRUNE,
)  # fmt: skip
