-- A message's id is its lane in the high bits and its offset in the low 40, so that one
-- integer key appends, scans a lane in order and finds an offset.
CREATE TABLE IF NOT EXISTS hf_lane (
    id INTEGER PRIMARY KEY,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    next INTEGER NOT NULL DEFAULT 0,
    UNIQUE (topic, partition)
);
CREATE TABLE IF NOT EXISTS hf_message (
    id INTEGER PRIMARY KEY,
    key BLOB,
    headers BLOB NOT NULL,
    body BLOB,
    stored REAL NOT NULL
);
-- Bumped whenever a member comes, goes or frees a lane, so that others look.
CREATE TABLE IF NOT EXISTS hf_group (
    name TEXT PRIMARY KEY,
    generation INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS hf_member (
    grp TEXT NOT NULL,
    id TEXT NOT NULL,
    topics TEXT NOT NULL,
    expires REAL NOT NULL,
    PRIMARY KEY (grp, id)
) WITHOUT ROWID;
-- Everything below `committed` is settled, everything from `fetched` on was never handed out.
CREATE TABLE IF NOT EXISTS hf_cursor (
    grp TEXT NOT NULL,
    lane INTEGER NOT NULL,
    committed INTEGER NOT NULL DEFAULT 0,
    fetched INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    epoch INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (grp, lane)
) WITHOUT ROWID;
-- Exceptions between the two: settled out of order (state 1), waiting to be handed out
-- again (0), or handed out again (2).
CREATE TABLE IF NOT EXISTS hf_mark (
    grp TEXT NOT NULL,
    lane INTEGER NOT NULL,
    position INTEGER NOT NULL,
    state INTEGER NOT NULL,
    failures INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (grp, lane, position)
) WITHOUT ROWID;
