-- name: settings
SELECT current_setting('wal_level') AS wal_level,
    CAST(current_setting('server_version_num') AS integer) AS version,
    current_setting('max_slot_wal_keep_size') AS keep,
    current_user AS role
-- name: publication
SELECT pubinsert AS insert, pubupdate AS update, pubdelete AS delete, pubtruncate AS truncate,
    COALESCE(obj_description(oid, 'pg_publication'), '') AS remark
FROM pg_publication WHERE pubname = :name
-- name: published
SELECT EXISTS (
    SELECT 1 FROM pg_publication_tables AS p
    JOIN pg_class AS c ON c.relname = p.tablename
    JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = p.schemaname
    WHERE p.pubname = :name AND c.oid = to_regclass(:table)
)
-- name: table
SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(:table)
-- name: slot
SELECT plugin, database = current_database() AS ours, active, active_pid, wal_status
FROM pg_replication_slots WHERE slot_name = :name
-- name: standing
SELECT wal_status, safe_wal_size,
    pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) AS retained,
    pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn) AS unconfirmed
FROM pg_replication_slots WHERE slot_name = :name
-- name: drop_slot
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
WHERE slot_name = :name AND NOT active
-- name: terminate_stale
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity AS a
JOIN pg_replication_slots AS s ON s.active_pid = a.pid
WHERE s.slot_name = :name AND s.database = current_database()
AND a.application_name LIKE 'holdfast-%' AND a.application_name <> :me
-- name: snapshot
SELECT CAST(pg_current_snapshot() AS text)
-- name: log_end
SELECT CAST(pg_current_wal_insert_lsn() AS text)
-- name: oldest
SELECT seq FROM holdfast_outbox WHERE NOT aggregatetype = ANY (CAST(:held AS text[]))
ORDER BY seq LIMIT 100
-- name: present
SELECT seq FROM holdfast_outbox WHERE seq = ANY (CAST(:seqs AS bigint[])) ORDER BY seq
-- name: park_gone
INSERT INTO holdfast_outbox_parked
    (seq, id, aggregatetype, aggregateid, type, payload, headers, shard, error, parked_at, state)
SELECT CAST(:seq AS bigint), CAST(:id AS uuid),
    CAST(:topic AS varchar), CAST(:key AS varchar), CAST(:type AS varchar),
    CAST(:payload AS bytea), CAST(:headers AS json), CAST(:shard AS smallint),
    CAST(:error AS text), CAST(:now AS timestamptz), CAST(:state AS varchar)
WHERE NOT EXISTS (
    SELECT 1 FROM holdfast_outbox_parked AS p WHERE p.id = CAST(:id AS uuid)
    AND p.aggregatetype = CAST(:topic AS varchar)
    AND p.aggregateid IS NOT DISTINCT FROM CAST(:key AS varchar)
)
