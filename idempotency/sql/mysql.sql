-- The clock is counted in UTC: a local one shows an hour twice when summer time ends.
-- name: now
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 AS now
-- name: greet
INSERT INTO holdfast_owner (owner, until) VALUES (:owner, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 + :ttl)
ON DUPLICATE KEY UPDATE until = VALUES(until)
-- name: start
INSERT INTO holdfast_start (consumer, message_id, owner, alone, at)
SELECT :consumer, id, :owner, :alone, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(255) PATH '$')) j
ON DUPLICATE KEY UPDATE alone = VALUES(alone), at = VALUES(at)
-- name: finish
-- The list drives the join: a scan would wait for the marks of others.
DELETE s FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(255) PATH '$')) j
STRAIGHT_JOIN holdfast_start s
ON s.consumer = :consumer AND s.message_id = j.id AND s.owner = :owner
-- name: standing
SELECT a.message_id, a.failed, a.released, a.crashed, a.suspected, a.first_failed_at,
    a.last_failed_at, a.last_error, 0 AS begun, 0 AS begun_alone,
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 - a.first_failed_at AS failing_for
FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(255) PATH '$')) j
STRAIGHT_JOIN holdfast_attempt a ON a.consumer = :consumer AND a.message_id = j.id
UNION ALL
SELECT s.message_id, 0, 0, 0, 0, NULL, NULL, NULL, count(*), sum(s.alone), NULL
FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(255) PATH '$')) j
STRAIGHT_JOIN holdfast_start s
ON s.consumer = :consumer AND s.message_id = j.id AND s.owner <> :owner AND s.alone >= 0
GROUP BY s.message_id
-- name: blame
INSERT INTO holdfast_attempt (consumer, message_id, failed, released, crashed, suspected,
    first_failed_at, last_failed_at, last_error, changed_at)
VALUES (:consumer, :id, :failed, :released, :crashed, :suspected,
    CASE WHEN :failed > 0 THEN TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 END,
    CASE WHEN :failed > 0 THEN TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 END, :error,
    TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)
ON DUPLICATE KEY UPDATE failed = failed + VALUES(failed), released = released + VALUES(released),
    crashed = crashed + VALUES(crashed), suspected = suspected + VALUES(suspected),
    first_failed_at = coalesce(first_failed_at, VALUES(first_failed_at)),
    last_failed_at = coalesce(VALUES(last_failed_at), last_failed_at),
    last_error = coalesce(VALUES(last_error), last_error), changed_at = VALUES(changed_at)
-- What was settled counts for nobody's crash any more, and stays as company: alone - 2.
-- name: settle_marks
UPDATE JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(255) PATH '$')) j
STRAIGHT_JOIN holdfast_start s ON s.consumer = :consumer AND s.message_id = j.id
SET s.alone = s.alone - 2 WHERE s.alone >= 0
-- name: forget
DELETE a FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(255) PATH '$')) j
STRAIGHT_JOIN holdfast_attempt a ON a.consumer = :consumer AND a.message_id = j.id
-- name: dead_owners
SELECT owner FROM holdfast_owner WHERE until < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
ORDER BY owner LIMIT :most FOR UPDATE SKIP LOCKED
-- name: adopt
-- An owner that was buried while it still began something gets a last term.
INSERT IGNORE INTO holdfast_owner (owner, until)
SELECT DISTINCT s.owner, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 + :ttl
FROM holdfast_start s LEFT JOIN holdfast_owner o ON o.owner = s.owner
WHERE o.owner IS NULL
-- name: marks_of
SELECT consumer, message_id, alone FROM holdfast_start WHERE owner = :owner
ORDER BY consumer, message_id
-- Again, and locked: what is being settled is waited for.
-- name: lock_marks
SELECT s.consumer, s.message_id, s.alone
FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id VARCHAR(255) PATH '$')) j
STRAIGHT_JOIN holdfast_start s
ON s.consumer = :consumer AND s.message_id = j.id AND s.owner = :owner
FOR UPDATE
-- name: bury
DELETE FROM holdfast_owner WHERE owner = :owner
-- name: old_attempts
SELECT consumer, message_id FROM holdfast_attempt
WHERE changed_at < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 - :age
ORDER BY changed_at LIMIT :most FOR UPDATE SKIP LOCKED
-- name: claim
-- MySQL: how many were new is all it tells.
INSERT IGNORE INTO holdfast_inbox (consumer, message, handled_at, digest)
SELECT :consumer, UNHEX(j.message), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6, UNHEX(j.digest)
FROM JSON_TABLE(:packed, '$[*]' COLUMNS (message CHAR(32) PATH '$[0]', digest CHAR(16) PATH '$[1]')) j
-- name: claim_returning
-- MariaDB.
INSERT IGNORE INTO holdfast_inbox (consumer, message, handled_at, digest)
SELECT :consumer, UNHEX(j.message), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6, UNHEX(j.digest)
FROM JSON_TABLE(:packed, '$[*]' COLUMNS (message CHAR(32) PATH '$[0]', digest CHAR(16) PATH '$[1]')) j
RETURNING message
-- name: recall
-- A locking read sees what a rival has just committed, also under REPEATABLE READ.
SELECT i.message, i.digest, i.result
FROM JSON_TABLE(:packed, '$[*]' COLUMNS (message CHAR(32) PATH '$')) j
STRAIGHT_JOIN holdfast_inbox i ON i.consumer = :consumer AND i.message = UNHEX(j.message)
LOCK IN SHARE MODE
-- name: unclaim
DELETE i FROM JSON_TABLE(:packed, '$[*]' COLUMNS (message CHAR(32) PATH '$')) j
STRAIGHT_JOIN holdfast_inbox i ON i.consumer = :consumer AND i.message = UNHEX(j.message)
-- name: keep_result
UPDATE holdfast_inbox SET result = :result WHERE consumer = :consumer AND message = :message
-- name: old_rows
SELECT message FROM holdfast_inbox
WHERE consumer = :consumer AND handled_at < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 - :age
LIMIT :most FOR UPDATE SKIP LOCKED
-- name: savepoint
SAVEPOINT holdfast_claim
-- name: rollback
ROLLBACK TO SAVEPOINT holdfast_claim
-- name: release
RELEASE SAVEPOINT holdfast_claim
-- name: prune_leases
DELETE FROM holdfast_inbox_lease
WHERE consumer = :consumer AND until < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6 - :age
-- name: lease_seed
INSERT INTO holdfast_inbox_lease (consumer, message, token, until)
VALUES (:of, :what, 0, 0)
-- Locks the row for writing; IGNORE would lock it for reading, and two such wait in a circle.
ON DUPLICATE KEY UPDATE token = token
-- name: version_seed
INSERT INTO holdfast_version (consumer, entity, version, stale, changed_at)
VALUES (:consumer, :entity, :version, 0, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)
-- Locks the row for writing; IGNORE would lock it for reading, and two such wait in a circle.
ON DUPLICATE KEY UPDATE stale = stale
-- name: version_look
SELECT version FROM holdfast_version WHERE consumer = :consumer AND entity = :entity FOR UPDATE
-- name: version_set
UPDATE holdfast_version SET version = :version, changed_at = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
WHERE consumer = :consumer AND entity = :entity
-- name: version_stale
UPDATE holdfast_version SET stale = stale + 1, last_stale = :version, changed_at = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6
WHERE consumer = :consumer AND entity = :entity
-- name: version_forget
DELETE FROM holdfast_version WHERE consumer = :consumer AND entity = :entity
-- name: ahead_hold
INSERT INTO holdfast_ahead (consumer, entity, version, content, held_at)
VALUES (:consumer, :entity, :version, :content, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)
ON DUPLICATE KEY UPDATE held_at = held_at
-- name: ahead_count
-- Locking: at REPEATABLE READ a plain read would not see what was held after the snapshot.
SELECT count(*) FROM holdfast_ahead WHERE consumer = :consumer AND entity = :entity FOR UPDATE
-- name: ahead_read
SELECT version, content FROM holdfast_ahead
WHERE consumer = :consumer AND entity = :entity AND version >= :version
ORDER BY version LIMIT :most FOR UPDATE
-- name: ahead_drop
DELETE FROM holdfast_ahead
WHERE consumer = :consumer AND entity = :entity AND version <= :version
