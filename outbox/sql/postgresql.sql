-- name: seed
INSERT INTO holdfast_outbox_shard (shard, owner, until, epoch)
SELECT n, NULL, 0, 0 FROM generate_series(0, :last) AS n ON CONFLICT DO NOTHING
-- name: greet
INSERT INTO holdfast_outbox_relay (id, until, engine, host)
VALUES (:me, extract(epoch FROM clock_timestamp()) + :ttl, :engine, :host)
ON CONFLICT (id) DO UPDATE SET until = excluded.until
-- name: bury
DELETE FROM holdfast_outbox_relay
WHERE id = :me OR until < extract(epoch FROM clock_timestamp())
-- name: peers
SELECT count(*) FROM holdfast_outbox_relay
WHERE until >= extract(epoch FROM clock_timestamp()) AND engine = :engine
-- name: claim
SELECT shard FROM holdfast_outbox_shard
WHERE owner = :me OR owner IS NULL OR until < extract(epoch FROM clock_timestamp())
ORDER BY (owner = :me) DESC NULLS LAST, shard LIMIT :quota FOR UPDATE SKIP LOCKED
-- name: take
UPDATE holdfast_outbox_shard
SET epoch = epoch + CASE WHEN owner = :me THEN 0 ELSE 1 END,
    owner = :me, until = extract(epoch FROM clock_timestamp()) + :ttl
WHERE shard = ANY (CAST(:shards AS smallint[]))
-- name: extend
UPDATE holdfast_outbox_shard SET until = extract(epoch FROM clock_timestamp()) + :ttl
WHERE owner = :me AND until > extract(epoch FROM clock_timestamp())
AND shard = ANY (CAST(:shards AS smallint[])) RETURNING shard
-- name: free
UPDATE holdfast_outbox_shard SET owner = NULL, until = 0
WHERE owner = :me AND NOT shard = ANY (CAST(:shards AS smallint[]))
-- name: guard
SELECT shard, epoch FROM holdfast_outbox_shard
WHERE owner = :me AND until > extract(epoch FROM clock_timestamp())
AND shard = ANY (CAST(:shards AS smallint[])) FOR SHARE
-- name: read
SELECT seq, shard, aggregatetype, aggregateid, payload, CAST(headers AS text),
    CAST(id AS text), type
FROM holdfast_outbox
WHERE seq > :after AND shard = ANY (CAST(:shards AS smallint[]))
ORDER BY seq LIMIT :most
-- name: read_all
SELECT seq, shard, aggregatetype, aggregateid, payload, CAST(headers AS text),
    CAST(id AS text), type
FROM holdfast_outbox WHERE seq > :after ORDER BY seq LIMIT :most
-- name: read_but
SELECT seq, shard, aggregatetype, aggregateid, payload, CAST(headers AS text),
    CAST(id AS text), type
FROM holdfast_outbox
WHERE seq > :after
AND NOT aggregatetype = ANY (ARRAY(SELECT json_array_elements_text(CAST(:held AS json))))
AND shard = ANY (CAST(:shards AS smallint[]))
ORDER BY seq LIMIT :most
-- name: read_all_but
SELECT seq, shard, aggregatetype, aggregateid, payload, CAST(headers AS text),
    CAST(id AS text), type
FROM holdfast_outbox
WHERE seq > :after
AND NOT aggregatetype = ANY (ARRAY(SELECT json_array_elements_text(CAST(:held AS json))))
ORDER BY seq LIMIT :most
-- name: look
SELECT seq, shard, aggregatetype, aggregateid, payload, CAST(headers AS text),
    CAST(id AS text), type
FROM holdfast_outbox
WHERE NOT seq = ANY (CAST(:but AS bigint[])) AND shard = ANY (CAST(:shards AS smallint[]))
ORDER BY seq LIMIT :most
-- name: look_all
SELECT seq, shard, aggregatetype, aggregateid, payload, CAST(headers AS text),
    CAST(id AS text), type
FROM holdfast_outbox WHERE NOT seq = ANY (CAST(:but AS bigint[])) ORDER BY seq LIMIT :most
-- name: any_parked
SELECT seq FROM holdfast_outbox_parked LIMIT 1
-- name: delete
DELETE FROM holdfast_outbox WHERE seq = ANY (CAST(:seqs AS bigint[]))
-- name: delete_run
DELETE FROM holdfast_outbox WHERE seq BETWEEN :first AND :last
-- name: next_due
SELECT min(due) - extract(epoch FROM clock_timestamp()) FROM holdfast_outbox_delayed
-- name: key_lock
SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))
-- name: now
SELECT extract(epoch FROM clock_timestamp()) AS now
-- name: attach
INSERT INTO holdfast_outbox
    (id, aggregatetype, aggregateid, type, shard, headers, payload)
SELECT CAST(e ->> 0 AS uuid), e ->> 1, e ->> 2, e ->> 3, CAST(e ->> 4 AS smallint),
    CAST(:holdfast_headers AS json), CAST(:holdfast_payload AS bytea)
FROM (SELECT CAST(:holdfast_event AS json) AS e) AS one
-- name: fill_holdfast_outbox
INSERT INTO holdfast_outbox
    (id, aggregatetype, aggregateid, type, shard, headers, payload)
SELECT CAST(id AS uuid), coalesce(topic, CAST(:topic AS text)), key,
    coalesce(type, CAST(:type AS text)), CAST(shard AS smallint), CAST(headers AS json),
    substr(CAST(:payloads AS bytea), CAST(ends AS integer) - CAST(size AS integer) + 1,
        CAST(size AS integer))
FROM unnest(string_to_array(CAST(:ids AS text), chr(31)),
    string_to_array(CAST(:topics AS text), chr(31)),
    string_to_array(CAST(:keys AS text), chr(31), chr(30)),
    string_to_array(CAST(:types AS text), chr(31)),
    string_to_array(CAST(:shards AS text), chr(31)),
    string_to_array(CAST(:headers AS text), chr(31)),
    string_to_array(CAST(:sizes AS text), chr(31), chr(30)),
    string_to_array(CAST(:ends AS text), chr(31)))
    WITH ORDINALITY AS event (id, topic, key, type, shard, headers, size, ends)
ORDER BY ordinality
-- name: fill_holdfast_outbox_delayed
INSERT INTO holdfast_outbox_delayed
    (id, aggregatetype, aggregateid, type, shard, headers, payload, due)
SELECT CAST(id AS uuid), coalesce(topic, CAST(:topic AS text)), key,
    coalesce(type, CAST(:type AS text)), CAST(shard AS smallint), CAST(headers AS json),
    substr(CAST(:payloads AS bytea), CAST(ends AS integer) - CAST(size AS integer) + 1,
        CAST(size AS integer)), CAST(due AS double precision)
FROM unnest(string_to_array(CAST(:ids AS text), chr(31)),
    string_to_array(CAST(:topics AS text), chr(31)),
    string_to_array(CAST(:keys AS text), chr(31), chr(30)),
    string_to_array(CAST(:types AS text), chr(31)),
    string_to_array(CAST(:shards AS text), chr(31)),
    string_to_array(CAST(:headers AS text), chr(31)),
    string_to_array(CAST(:sizes AS text), chr(31), chr(30)),
    string_to_array(CAST(:ends AS text), chr(31)),
    string_to_array(CAST(:dues AS text), chr(31)))
    WITH ORDINALITY AS event (id, topic, key, type, shard, headers, size, ends, due)
ORDER BY ordinality
-- What tracing's "write" inserts, in the same round trip.
-- name: fill_with_lineage
WITH staged AS (
    INSERT INTO holdfast_outbox (id, aggregatetype, aggregateid, type, shard, headers, payload)
    SELECT CAST(id AS uuid), coalesce(topic, CAST(:topic AS text)), key,
        coalesce(type, CAST(:type AS text)), CAST(shard AS smallint), CAST(headers AS json),
        substr(CAST(:payloads AS bytea), CAST(ends AS integer) - CAST(size AS integer) + 1,
            CAST(size AS integer))
    FROM unnest(string_to_array(CAST(:ids AS text), chr(31)),
        string_to_array(CAST(:topics AS text), chr(31)),
        string_to_array(CAST(:keys AS text), chr(31), chr(30)),
        string_to_array(CAST(:types AS text), chr(31)),
        string_to_array(CAST(:shards AS text), chr(31)),
        string_to_array(CAST(:headers AS text), chr(31)),
        string_to_array(CAST(:sizes AS text), chr(31), chr(30)),
        string_to_array(CAST(:ends AS text), chr(31)))
        WITH ORDINALITY AS event (id, topic, key, type, shard, headers, size, ends)
    ORDER BY ordinality
)
INSERT INTO holdfast_lineage (event_id, type, correlation_id, causation_id, source, topic,
    message_key, time, outcome, service, at)
SELECT id, coalesce(type, CAST(:type AS text)), coalesce(correlation_id, id), causation_id,
    coalesce(source, CAST(:source AS text)), coalesce(topic, CAST(:topic AS text)), key,
    CAST(time AS double precision), 'published', CAST(:service AS text),
    (SELECT extract(epoch FROM clock_timestamp()))
FROM unnest(string_to_array(CAST(:ids AS text), chr(31)),
    string_to_array(CAST(:types AS text), chr(31)),
    string_to_array(CAST(:correlations AS text), chr(31), chr(30)),
    string_to_array(CAST(:causes AS text), chr(31), chr(30)),
    string_to_array(CAST(:sources AS text), chr(31)),
    string_to_array(CAST(:topics AS text), chr(31)),
    string_to_array(CAST(:keys AS text), chr(31), chr(30)),
    string_to_array(CAST(:times AS text), chr(31)))
    AS event (id, type, correlation_id, causation_id, source, topic, key, time)
