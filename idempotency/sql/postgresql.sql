-- name: now
SELECT extract(epoch FROM clock_timestamp()) AS now
-- name: greet
INSERT INTO holdfast_owner (owner, until) VALUES (:owner, extract(epoch FROM clock_timestamp()) + :ttl)
ON CONFLICT (owner) DO UPDATE SET until = excluded.until
-- name: start
INSERT INTO holdfast_start (consumer, message_id, owner, alone, at)
SELECT :consumer, id, :owner, :alone, extract(epoch FROM clock_timestamp())
FROM json_array_elements_text(CAST(:ids AS json)) AS id
ON CONFLICT (consumer, message_id, owner) DO UPDATE SET alone = excluded.alone, at = excluded.at
-- Lists drive, as relations of their own (LIMIT) that bring the other parts of the key along: of
-- a fresh table the planner knows nothing, and "consumer = ?" alone would look like few rows. The
-- LIMIT also tells it how long the list is.
-- name: finish
DELETE FROM holdfast_start
WHERE (consumer, message_id, owner) IN (SELECT CAST(:consumer AS text), id, CAST(:owner AS text)
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    LIMIT json_array_length(CAST(:ids AS json)))
-- name: standing
SELECT message_id, failed, released, crashed, suspected, first_failed_at, last_failed_at,
    last_error, 0 AS begun, 0 AS begun_alone,
    extract(epoch FROM clock_timestamp()) - first_failed_at AS failing_for
FROM holdfast_attempt
WHERE (consumer, message_id) IN (SELECT CAST(:consumer AS text), id
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    LIMIT json_array_length(CAST(:ids AS json)))
UNION ALL
SELECT message_id, 0, 0, 0, 0, CAST(NULL AS double precision), CAST(NULL AS double precision), CAST(NULL AS text), count(*), sum(alone), CAST(NULL AS double precision)
FROM holdfast_start
WHERE owner <> :owner AND alone >= 0 AND (consumer, message_id) IN (SELECT CAST(:consumer AS text), id
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    LIMIT json_array_length(CAST(:ids AS json)))
GROUP BY message_id
-- name: blame
INSERT INTO holdfast_attempt (consumer, message_id, failed, released, crashed, suspected,
    first_failed_at, last_failed_at, last_error, changed_at)
VALUES (:consumer, :id, :failed, :released, :crashed, :suspected,
    CASE WHEN CAST(:failed AS integer) > 0 THEN extract(epoch FROM clock_timestamp()) END,
    CASE WHEN CAST(:failed AS integer) > 0 THEN extract(epoch FROM clock_timestamp()) END, CAST(:error AS text),
    extract(epoch FROM clock_timestamp()))
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
WHERE alone >= 0 AND (consumer, message_id) IN (SELECT CAST(:consumer AS text), id
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    LIMIT json_array_length(CAST(:ids AS json)))
-- name: forget
DELETE FROM holdfast_attempt
WHERE (consumer, message_id) IN (SELECT CAST(:consumer AS text), id
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    LIMIT json_array_length(CAST(:ids AS json)))
-- name: dead_owners
SELECT owner FROM holdfast_owner WHERE until < extract(epoch FROM clock_timestamp())
ORDER BY owner LIMIT :most FOR UPDATE SKIP LOCKED
-- name: adopt
-- An owner that was buried while it still began something gets a last term.
INSERT INTO holdfast_owner (owner, until)
SELECT DISTINCT s.owner, extract(epoch FROM clock_timestamp()) + :ttl
FROM holdfast_start s LEFT JOIN holdfast_owner o ON o.owner = s.owner
WHERE o.owner IS NULL
ON CONFLICT DO NOTHING
-- name: marks_of
SELECT consumer, message_id, alone FROM holdfast_start WHERE owner = :owner
ORDER BY consumer, message_id
-- Again, and locked: what is being settled is waited for.
-- name: lock_marks
SELECT consumer, message_id, alone FROM holdfast_start
WHERE (consumer, message_id, owner) IN (SELECT CAST(:consumer AS text), id, CAST(:owner AS text)
    FROM json_array_elements_text(CAST(:ids AS json)) AS id
    LIMIT json_array_length(CAST(:ids AS json)))
ORDER BY message_id FOR UPDATE
-- name: bury
DELETE FROM holdfast_owner WHERE owner = :owner
-- name: old_attempts
SELECT consumer, message_id FROM holdfast_attempt
WHERE changed_at < extract(epoch FROM clock_timestamp()) - :age
ORDER BY changed_at LIMIT :most FOR UPDATE SKIP LOCKED
-- name: claim
-- The keys and digests travel as one parameter, and the new keys return as one value, or
-- none at all when every key is new.
WITH fresh AS (
    INSERT INTO holdfast_inbox (consumer, message, handled_at, digest)
    SELECT :consumer, substr(CAST(:packed AS bytea), n * 24 + 1, 16),
        (SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)),
        substr(CAST(:packed AS bytea), n * 24 + 17, 8)
    FROM generate_series(0, CAST(:last AS integer)) AS n
    ON CONFLICT DO NOTHING RETURNING message
)
SELECT count(*), CASE WHEN count(*) <= :last THEN string_agg(message, CAST('' AS bytea)) END
FROM fresh
-- name: claim_hopefully
-- Half the cost where every key is new; otherwise it fails, and the claim above is made.
INSERT INTO holdfast_inbox (consumer, message, handled_at, digest)
SELECT :consumer, substr(CAST(:packed AS bytea), n * 24 + 1, 16),
    (SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)),
    substr(CAST(:packed AS bytea), n * 24 + 17, 8)
FROM generate_series(0, CAST(:last AS integer)) AS n
-- name: recall
SELECT message, digest, result FROM holdfast_inbox
WHERE (consumer, message) IN (
    SELECT CAST(:consumer AS bigint), substr(CAST(:packed AS bytea), n * 16 + 1, 16)
    FROM generate_series(0, CAST(:last AS integer)) AS n
    LIMIT CAST(:last AS integer) + 1)
-- name: unclaim
DELETE FROM holdfast_inbox
WHERE (consumer, message) IN (
    SELECT CAST(:consumer AS bigint), substr(CAST(:packed AS bytea), n * 16 + 1, 16)
    FROM generate_series(0, CAST(:last AS integer)) AS n
    LIMIT CAST(:last AS integer) + 1)
-- name: keep_result
UPDATE holdfast_inbox SET result = :result WHERE consumer = :consumer AND message = :message
-- name: old_rows
SELECT message FROM holdfast_inbox
WHERE consumer = :consumer AND handled_at < extract(epoch FROM clock_timestamp()) - :age
LIMIT :most FOR UPDATE SKIP LOCKED
-- name: prune_leases
DELETE FROM holdfast_inbox_lease
WHERE consumer = :consumer AND until < extract(epoch FROM clock_timestamp()) - :age
-- name: lease_seed
INSERT INTO holdfast_inbox_lease (consumer, message, token, until)
VALUES (:of, :what, 0, 0)
ON CONFLICT DO NOTHING
-- name: version_seed
INSERT INTO holdfast_version (consumer, entity, version, stale, changed_at)
VALUES (:consumer, :entity, :version, 0, extract(epoch FROM clock_timestamp()))
ON CONFLICT DO NOTHING
-- name: version_look
SELECT version FROM holdfast_version WHERE consumer = :consumer AND entity = :entity FOR UPDATE
-- name: version_set
UPDATE holdfast_version SET version = :version, changed_at = extract(epoch FROM clock_timestamp())
WHERE consumer = :consumer AND entity = :entity
-- name: version_stale
UPDATE holdfast_version SET stale = stale + 1, last_stale = :version, changed_at = extract(epoch FROM clock_timestamp())
WHERE consumer = :consumer AND entity = :entity
-- name: version_forget
DELETE FROM holdfast_version WHERE consumer = :consumer AND entity = :entity
-- name: ahead_hold
INSERT INTO holdfast_ahead (consumer, entity, version, content, held_at)
VALUES (:consumer, :entity, :version, :content, extract(epoch FROM clock_timestamp()))
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
