-- name: now
SELECT (julianday('now') - 2440587.5) * 86400.0 AS now
-- name: greet
INSERT INTO holdfast_owner (owner, until) VALUES (:owner, (julianday('now') - 2440587.5) * 86400.0 + :ttl)
ON CONFLICT (owner) DO UPDATE SET until = excluded.until
-- name: start
INSERT INTO holdfast_start (consumer, message_id, owner, alone, at)
SELECT :consumer, value, :owner, :alone, (julianday('now') - 2440587.5) * 86400.0
FROM json_each(:ids) WHERE true
ON CONFLICT (consumer, message_id, owner) DO UPDATE SET alone = excluded.alone, at = excluded.at
-- name: finish
DELETE FROM holdfast_start
WHERE consumer = :consumer AND owner = :owner AND message_id IN (SELECT value FROM json_each(:ids))
-- name: standing
SELECT message_id, failed, released, crashed, suspected, first_failed_at, last_failed_at,
    last_error, 0 AS begun, 0 AS begun_alone,
    (julianday('now') - 2440587.5) * 86400.0 - first_failed_at AS failing_for
FROM holdfast_attempt
WHERE consumer = :consumer AND message_id IN (SELECT value FROM json_each(:ids))
UNION ALL
SELECT message_id, 0, 0, 0, 0, NULL, NULL, NULL, count(*), sum(alone), NULL
FROM holdfast_start
WHERE consumer = :consumer AND owner <> :owner AND alone >= 0
AND message_id IN (SELECT value FROM json_each(:ids))
GROUP BY message_id
-- name: blame
INSERT INTO holdfast_attempt (consumer, message_id, failed, released, crashed, suspected,
    first_failed_at, last_failed_at, last_error, changed_at)
VALUES (:consumer, :id, :failed, :released, :crashed, :suspected,
    CASE WHEN :failed > 0 THEN (julianday('now') - 2440587.5) * 86400.0 END,
    CASE WHEN :failed > 0 THEN (julianday('now') - 2440587.5) * 86400.0 END, :error,
    (julianday('now') - 2440587.5) * 86400.0)
ON CONFLICT (consumer, message_id) DO UPDATE SET
    failed = holdfast_attempt.failed + excluded.failed,
    released = holdfast_attempt.released + excluded.released,
    crashed = holdfast_attempt.crashed + excluded.crashed,
    suspected = holdfast_attempt.suspected + excluded.suspected,
    first_failed_at = coalesce(holdfast_attempt.first_failed_at, excluded.first_failed_at),
    last_failed_at = coalesce(excluded.last_failed_at, holdfast_attempt.last_failed_at),
    last_error = coalesce(excluded.last_error, holdfast_attempt.last_error),
    changed_at = excluded.changed_at
-- What was settled counts for nobody's crash any more, and stays as company: alone - 2.
-- name: settle_marks
UPDATE holdfast_start SET alone = alone - 2
WHERE alone >= 0 AND consumer = :consumer AND message_id IN (SELECT value FROM json_each(:ids))
-- name: forget
DELETE FROM holdfast_attempt
WHERE consumer = :consumer AND message_id IN (SELECT value FROM json_each(:ids))
-- name: dead_owners
SELECT owner FROM holdfast_owner WHERE until < (julianday('now') - 2440587.5) * 86400.0
ORDER BY owner LIMIT :most
-- name: adopt
-- An owner that was buried while it still began something gets a last term.
INSERT OR IGNORE INTO holdfast_owner (owner, until)
SELECT DISTINCT s.owner, (julianday('now') - 2440587.5) * 86400.0 + :ttl
FROM holdfast_start s LEFT JOIN holdfast_owner o ON o.owner = s.owner
WHERE o.owner IS NULL
-- name: marks_of
SELECT consumer, message_id, alone FROM holdfast_start WHERE owner = :owner
ORDER BY consumer, message_id
-- Again, and locked: what is being settled is waited for.
-- name: lock_marks
SELECT consumer, message_id, alone FROM holdfast_start
WHERE consumer = :consumer AND owner = :owner
AND message_id IN (SELECT value FROM json_each(:ids))
-- name: bury
DELETE FROM holdfast_owner WHERE owner = :owner
-- name: old_attempts
SELECT consumer, message_id FROM holdfast_attempt
WHERE changed_at < (julianday('now') - 2440587.5) * 86400.0 - :age
ORDER BY changed_at LIMIT :most
-- name: claim
INSERT INTO holdfast_inbox (consumer, message, handled_at, digest)
WITH RECURSIVE n (v) AS (SELECT 0 UNION ALL SELECT v + 1 FROM n WHERE v < :last)
SELECT :consumer, substr(:packed, v * 24 + 1, 16), (julianday('now') - 2440587.5) * 86400.0,
    substr(:packed, v * 24 + 17, 8)
FROM n WHERE true
ON CONFLICT DO NOTHING RETURNING message
-- name: recall
SELECT message, digest, result FROM holdfast_inbox
WHERE consumer = :consumer AND message IN (
    WITH RECURSIVE n (v) AS (SELECT 0 UNION ALL SELECT v + 1 FROM n WHERE v < :last)
    SELECT substr(:packed, v * 16 + 1, 16) FROM n)
-- name: unclaim
DELETE FROM holdfast_inbox
WHERE consumer = :consumer AND message IN (
    WITH RECURSIVE n (v) AS (SELECT 0 UNION ALL SELECT v + 1 FROM n WHERE v < :last)
    SELECT substr(:packed, v * 16 + 1, 16) FROM n)
-- name: keep_result
UPDATE holdfast_inbox SET result = :result WHERE consumer = :consumer AND message = :message
-- name: old_rows
SELECT message FROM holdfast_inbox
WHERE consumer = :consumer AND handled_at < (julianday('now') - 2440587.5) * 86400.0 - :age
LIMIT :most
-- name: prune_leases
DELETE FROM holdfast_inbox_lease
WHERE consumer = :consumer AND until < (julianday('now') - 2440587.5) * 86400.0 - :age
-- name: lease_seed
INSERT INTO holdfast_inbox_lease (consumer, message, token, until)
VALUES (:of, :what, 0, 0)
ON CONFLICT DO NOTHING
-- name: version_seed
INSERT INTO holdfast_version (consumer, entity, version, stale, changed_at)
VALUES (:consumer, :entity, :version, 0, (julianday('now') - 2440587.5) * 86400.0)
ON CONFLICT DO NOTHING
-- name: version_look
SELECT version FROM holdfast_version WHERE consumer = :consumer AND entity = :entity
-- name: version_set
UPDATE holdfast_version SET version = :version, changed_at = (julianday('now') - 2440587.5) * 86400.0
WHERE consumer = :consumer AND entity = :entity
-- name: version_stale
UPDATE holdfast_version SET stale = stale + 1, last_stale = :version, changed_at = (julianday('now') - 2440587.5) * 86400.0
WHERE consumer = :consumer AND entity = :entity
-- name: version_forget
DELETE FROM holdfast_version WHERE consumer = :consumer AND entity = :entity
-- name: ahead_hold
INSERT INTO holdfast_ahead (consumer, entity, version, content, held_at)
VALUES (:consumer, :entity, :version, :content, (julianday('now') - 2440587.5) * 86400.0)
ON CONFLICT DO NOTHING
-- name: ahead_count
SELECT count(*) FROM holdfast_ahead WHERE consumer = :consumer AND entity = :entity
-- name: ahead_read
SELECT version, content FROM holdfast_ahead
WHERE consumer = :consumer AND entity = :entity AND version >= :version
ORDER BY version LIMIT :most
-- name: ahead_drop
DELETE FROM holdfast_ahead
WHERE consumer = :consumer AND entity = :entity AND version <= :version
