-- Many rows with one statement: each list comes as JSON, for psycopg would send a statement a row.
-- What is stored as bytes is text in it, and what it holds of JSON is a text as well: PostgreSQL
-- takes no JSON apart that holds a zero character.
-- Who was overtaken inserts nothing: it could meet the rows of who was quicker.
-- name: write
WITH saved AS (
    UPDATE holdfast_saga AS s
    SET progress = convert_to(n.progress, 'UTF8'), data = convert_to(n.data, 'UTF8'),
        status = n.status, reason = n.reason, revision = n.revision, version = n.version,
        hash = n.hash, changed_at = extract(epoch FROM clock_timestamp()),
        alerted_at = CASE WHEN s.status = n.status THEN s.alerted_at END,
        active_key = CASE WHEN NOT n.ends THEN s.active_key END,
        deadline_at = CASE WHEN NOT n.ends THEN s.deadline_at END,
        ended_at = CASE WHEN n.ends THEN extract(epoch FROM clock_timestamp()) ELSE s.ended_at END
    FROM json_to_recordset(CAST(:sagas AS json)) AS n(
        id text, read bigint, revision bigint, progress text, data text, status text, reason text,
        version integer, hash text, ends boolean)
    WHERE s.id = n.id AND s.revision = n.read
    RETURNING s.id
), ended AS (
    UPDATE holdfast_saga_step AS s
    SET status = n.status, error = n.error, ended_at = extract(epoch FROM clock_timestamp())
    FROM json_to_recordset(CAST(:ended AS json)) AS n(
        saga_id text, step text, direction text, attempt integer, status text, error text)
    WHERE s.saga_id = n.saga_id AND s.step = n.step AND s.direction = n.direction
    AND s.attempt = n.attempt
), begun AS (
    INSERT INTO holdfast_saga_step (
        saga_id, step, direction, attempt, status, message_id, began_at, error)
    SELECT saga_id, step, direction, attempt, status, message_id,
        extract(epoch FROM clock_timestamp()), error
    FROM json_to_recordset(CAST(:begun AS json)) AS n(
        saga_id text, step text, direction text, attempt integer, status text, message_id text,
        error text)
    WHERE :starts OR saga_id IN (SELECT id FROM saved)
), timers AS (
    INSERT INTO holdfast_saga_timer (
        saga_id, step, direction, attempt, kind, type, version, due, tries, until, epoch)
    SELECT saga_id, step, direction, attempt, kind, type, version,
        extract(epoch FROM clock_timestamp()) + delay, 0, 0, 0
    FROM json_to_recordset(CAST(:timers AS json)) AS n(
        saga_id text, step text, direction text, attempt integer, kind text, type text,
        version integer, delay double precision)
    WHERE :starts OR saga_id IN (SELECT id FROM saved)
), cleared AS (
    DELETE FROM holdfast_saga_timer AS t
    USING json_to_recordset(CAST(:cleared AS json)) AS n(saga_id text, step text, keep boolean)
    WHERE t.saga_id = n.saga_id AND (n.step = '' OR t.step = n.step) AND t.kind <> 'reply'
    AND NOT (n.keep AND t.kind = 'deadline')
), told AS (
    INSERT INTO holdfast_saga_history (saga_id, seq, at, event, effects, causation_id)
    SELECT saga_id, seq, extract(epoch FROM clock_timestamp()), convert_to(event, 'UTF8'),
        convert_to(effects, 'UTF8'), causation_id
    FROM json_to_recordset(CAST(:history AS json)) AS n(
        saga_id text, seq bigint, event text, effects text, causation_id text)
    WHERE :starts OR saga_id IN (SELECT id FROM saved)
)
SELECT count(*) FROM saved
-- name: clear_timers
DELETE FROM holdfast_saga_timer AS t
USING json_to_recordset(CAST(:cleared AS json)) AS n(saga_id text, step text, keep boolean)
WHERE t.saga_id = n.saga_id AND (n.step = '' OR t.step = n.step) AND t.kind <> 'reply'
AND NOT (n.keep AND t.kind = 'deadline')
-- name: take_timers
UPDATE holdfast_saga_timer AS t
SET owner = :owner, epoch = n.epoch, until = extract(epoch FROM clock_timestamp()) + :seconds
FROM json_to_recordset(CAST(:timers AS json)) AS n(
    saga_id text, step text, direction text, attempt integer, kind text, epoch bigint)
WHERE t.saga_id = n.saga_id AND t.step = n.step AND t.direction = n.direction
AND t.attempt = n.attempt AND t.kind = n.kind
-- name: finish_timers
DELETE FROM holdfast_saga_timer AS t
USING json_to_recordset(CAST(:timers AS json)) AS n(
    saga_id text, step text, direction text, attempt integer, kind text, epoch bigint)
WHERE t.saga_id = n.saga_id AND t.step = n.step AND t.direction = n.direction
AND t.attempt = n.attempt AND t.kind = n.kind AND t.epoch = n.epoch
