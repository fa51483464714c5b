-- name: seed
INSERT OR IGNORE INTO holdfast_outbox_shard (shard, owner, until, epoch)
WITH RECURSIVE n (v) AS (SELECT 0 UNION ALL SELECT v + 1 FROM n WHERE v < :last)
SELECT v, NULL, 0, 0 FROM n
-- name: greet
INSERT INTO holdfast_outbox_relay (id, until, engine, host)
VALUES (:me, (julianday('now') - 2440587.5) * 86400.0 + :ttl, :engine, :host)
ON CONFLICT (id) DO UPDATE SET until = excluded.until
-- name: bury
DELETE FROM holdfast_outbox_relay
WHERE id = :me OR until < (julianday('now') - 2440587.5) * 86400.0
-- name: peers
SELECT count(*) FROM holdfast_outbox_relay
WHERE until >= (julianday('now') - 2440587.5) * 86400.0 AND engine = :engine
-- name: claim
SELECT shard FROM holdfast_outbox_shard
WHERE owner = :me OR owner IS NULL OR until < (julianday('now') - 2440587.5) * 86400.0
ORDER BY CASE WHEN owner = :me THEN 0 ELSE 1 END, shard LIMIT :quota
-- name: take
UPDATE holdfast_outbox_shard
SET epoch = epoch + CASE WHEN owner = :me THEN 0 ELSE 1 END,
    owner = :me, until = (julianday('now') - 2440587.5) * 86400.0 + :ttl
WHERE shard IN (SELECT value FROM json_each('[' || :shards || ']'))
-- name: free
UPDATE holdfast_outbox_shard SET owner = NULL, until = 0
WHERE owner = :me AND shard NOT IN (SELECT value FROM json_each('[' || :shards || ']'))
-- name: guard
SELECT shard, epoch FROM holdfast_outbox_shard
WHERE owner = :me AND until > (julianday('now') - 2440587.5) * 86400.0
AND shard IN (SELECT value FROM json_each('[' || :shards || ']'))
-- name: read
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox
WHERE seq > :after AND shard IN (SELECT value FROM json_each('[' || :shards || ']'))
ORDER BY seq LIMIT :most
-- name: read_all
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox WHERE seq > :after ORDER BY seq LIMIT :most
-- name: read_but
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox
WHERE seq > :after
AND aggregatetype NOT IN (SELECT value FROM json_each(:held))
AND shard IN (SELECT value FROM json_each('[' || :shards || ']'))
ORDER BY seq LIMIT :most
-- name: read_all_but
SELECT seq, shard, aggregatetype, aggregateid, payload, headers, id, type
FROM holdfast_outbox
WHERE seq > :after
AND aggregatetype NOT IN (SELECT value FROM json_each(:held))
ORDER BY seq LIMIT :most
-- name: delete
DELETE FROM holdfast_outbox WHERE seq IN (SELECT value FROM json_each('[' || :seqs || ']'))
-- name: next_due
SELECT min(due) - (julianday('now') - 2440587.5) * 86400.0 FROM holdfast_outbox_delayed
-- name: now
SELECT (julianday('now') - 2440587.5) * 86400.0 AS now
