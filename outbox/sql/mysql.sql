-- The clock is counted in UTC: a local one shows an hour twice when summer time ends.
-- name: seed
INSERT IGNORE INTO holdfast_outbox_shard (shard, owner, until, epoch)
WITH RECURSIVE n (v) AS (SELECT 0 UNION ALL SELECT v + 1 FROM n WHERE v < :last)
SELECT v, NULL, 0, 0 FROM n
-- name: greet
INSERT INTO holdfast_outbox_relay (id, until, engine, host)
VALUES (:me, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 + :ttl, :engine, :host)
ON DUPLICATE KEY UPDATE until = VALUES(until)
-- name: bury
DELETE FROM holdfast_outbox_relay WHERE id = :me OR until < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
-- name: peers
SELECT count(*) FROM holdfast_outbox_relay
WHERE until >= TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 AND engine = :engine
-- name: claim
SELECT shard FROM holdfast_outbox_shard
WHERE owner = :me OR owner IS NULL OR until < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
ORDER BY CASE WHEN owner = :me THEN 0 ELSE 1 END, shard LIMIT :quota FOR UPDATE SKIP LOCKED
-- name: take
UPDATE holdfast_outbox_shard
SET epoch = epoch + CASE WHEN owner = :me THEN 0 ELSE 1 END,
    owner = :me, until = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 + :ttl
WHERE FIND_IN_SET(shard, :shards)
-- name: free
UPDATE holdfast_outbox_shard SET owner = NULL, until = 0
WHERE owner = :me AND NOT FIND_IN_SET(shard, :shards)
-- name: guard
-- The list drives the join: a scan would wait for the shards that others are renewing.
SELECT s.shard, s.epoch
FROM JSON_TABLE(CONCAT('[', :shards, ']'), '$[*]' COLUMNS (shard SMALLINT PATH '$')) j
STRAIGHT_JOIN holdfast_outbox_shard s ON s.shard = j.shard
WHERE s.owner = :me AND s.until > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
LOCK IN SHARE MODE
-- name: read
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox WHERE seq > :after AND FIND_IN_SET(shard, :shards)
ORDER BY seq LIMIT :most
-- name: read_all
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox WHERE seq > :after ORDER BY seq LIMIT :most
-- name: read_but
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox
WHERE seq > :after
AND NOT JSON_CONTAINS(:held, JSON_QUOTE(aggregatetype))
AND FIND_IN_SET(shard, :shards)
ORDER BY seq LIMIT :most
-- name: read_all_but
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox
WHERE seq > :after
AND NOT JSON_CONTAINS(:held, JSON_QUOTE(aggregatetype))
ORDER BY seq LIMIT :most
-- name: delete
-- The list drives the join: a scan would wait for rows that are not committed yet.
DELETE o FROM JSON_TABLE(CONCAT('[', :seqs, ']'), '$[*]' COLUMNS (seq BIGINT PATH '$')) j
STRAIGHT_JOIN holdfast_outbox o ON o.seq = j.seq
-- name: next_due
SELECT min(due) - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 FROM holdfast_outbox_delayed
-- name: now
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 AS now
